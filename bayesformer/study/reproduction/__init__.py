"""The study of Bayesian transformers at full size: what it consists of, what is missing, and its tables and claims."""

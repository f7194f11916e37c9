"""Text from a posterior over a language model, with the uncertainty of every token: `Posterior.generate`."""

from bayesformer.generation.answer_scores import SampledAnswers
from bayesformer.generation.result import Generation

__all__ = ["Generation", "SampledAnswers"]

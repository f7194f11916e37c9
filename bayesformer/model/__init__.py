"""A user's module as the library sees it: which weights are inferred, how it is called, what kind it is."""

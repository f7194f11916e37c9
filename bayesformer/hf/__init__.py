"""Doors for users of Hugging Face: text to data, a Trainer's run to a posterior, spans to answers.

    posterior = bf.hf.laplace_after(trainer)                       # after trainer.train()
    collect = bf.hf.Collect(method="swag"); Trainer(..., callbacks=[collect]).train(); collect.posterior()

Needs transformers: `pip install 'bayesformer[hf]'`.
"""

from bayesformer.hf.questions import EncodedQuestions, encode_questions
from bayesformer.hf.tasks import likelihood_of
from bayesformer.hf.texts import encode
from bayesformer.hf.trainer import TrainerCollect as Collect
from bayesformer.hf.trainer import laplace_after

__all__ = ["Collect", "EncodedQuestions", "encode", "encode_questions", "laplace_after", "likelihood_of"]

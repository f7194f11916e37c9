"""Reference posteriors: problems whose posterior is known, in closed form or by long Hamiltonian Monte Carlo.

They are the judge of every approximation: `bayesformer reference make NAME` computes one, `reference check NAME` checks
what is stored, and the tasks `fidelity/NAME` score methods against it. Every weight has the prior N(0, 1).
"""

from bayesformer.reference.problem_kind import PRIOR, ProblemData, ReferenceProblem
from bayesformer.reference.problems import PROBLEMS, problem_of
from bayesformer.reference.stored import ReferencePosterior, data_of, read

__all__ = [
    "PRIOR",
    "PROBLEMS",
    "ProblemData",
    "ReferencePosterior",
    "ReferenceProblem",
    "data_of",
    "problem_of",
    "read",
]

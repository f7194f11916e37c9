"""Old name of `bayesformer.core.strategy` and `bayesformer.core.workers`."""

from bayesformer.core.strategy import STRATEGIES, MemberTask, Strategy, run_members
from bayesformer.core.workers import cores, run_in_processes

__all__ = ["STRATEGIES", "MemberTask", "Strategy", "cores", "run_in_processes", "run_members"]

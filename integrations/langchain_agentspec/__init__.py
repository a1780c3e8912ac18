"""agentspec for LangChain: models that decode speculatively and exactly, votes, a cache, an account of agents."""

from typing import Any

from agentspec.errors import BudgetExceededError
from agentspec.report import AgentRun, read_runs
from agentspec.report.budget import BudgetWarning
from langchain_agentspec.cache import AgentSpecCache
from langchain_agentspec.callbacks import LatencyHandler, track_latency
from langchain_agentspec.chat_model import ChatAgentSpec
from langchain_agentspec.consistency import ConsistencyResult, SelfConsistency
from langchain_agentspec.llm import AgentSpecLLM
from langchain_agentspec.search import aexpand, best_of, expand

__all__ = [
    "AgentRun",
    "AgentSpecCache",
    "AgentSpecLLM",
    "BudgetExceededError",
    "BudgetWarning",
    "ChatAgentSpec",
    "ConsistencyResult",
    "LatencyHandler",
    "SelfConsistency",
    "SelfConsistencyMiddleware",
    "aexpand",
    "best_of",
    "expand",
    "read_runs",
    "track_latency",
]


def __getattr__(name: str) -> Any:
    """``SelfConsistencyMiddleware`` needs the ``langchain`` package, which the rest does without."""
    if name == "SelfConsistencyMiddleware":
        from langchain_agentspec.middleware import SelfConsistencyMiddleware

        return SelfConsistencyMiddleware
    raise AttributeError(f"module 'langchain_agentspec' has no attribute {name!r}")

"""agentspec for LangChain: models that decode speculatively and exactly, a cache, and an account of an agent's time."""

from langchain_agentspec.cache import AgentSpecCache
from langchain_agentspec.callbacks import LatencyHandler, track_latency
from langchain_agentspec.chat_model import ChatAgentSpec
from langchain_agentspec.llm import AgentSpecLLM

__all__ = ["AgentSpecCache", "AgentSpecLLM", "ChatAgentSpec", "LatencyHandler", "track_latency"]

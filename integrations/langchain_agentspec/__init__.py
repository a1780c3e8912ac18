"""agentspec for LangChain: a chat model that decodes speculatively and exactly, and an account of an agent's time."""

from langchain_agentspec.callbacks import LatencyHandler, track_latency
from langchain_agentspec.chat_model import ChatAgentSpec

__all__ = ["ChatAgentSpec", "LatencyHandler", "track_latency"]

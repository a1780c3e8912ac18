"""Messages and tools to token ids; emitted text to reasoning, content and tool calls.

Messages and tools are plain dicts in OpenAI's form, a call's arguments being a dict. Nothing here knows LangChain. A
new way to write tool calls is one entry in ``dialects.DIALECTS``.
"""

from agentspec.chat.answer_parser import AnswerParser
from agentspec.chat.call_checks import CheckedTool, checked_tools
from agentspec.chat.dialects import DIALECTS
from agentspec.chat.parser import Parser, Piece, ToolCall
from agentspec.chat.template import ChatFormat
from agentspec.chat.template_parser import TemplateParser

__all__ = [
    "DIALECTS",
    "AnswerParser",
    "ChatFormat",
    "CheckedTool",
    "Parser",
    "Piece",
    "TemplateParser",
    "ToolCall",
    "checked_tools",
]

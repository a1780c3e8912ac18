"""The ``format``s that are built, as expressions of a string's inside: each allows a part of its RFC."""

from __future__ import annotations

from agentspec.grammars.outlines.text import Pattern

_DATE = (
    r"[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"  # 29 February is not every year's
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_PATH = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"

FORMATS = {
    "date": Pattern(_DATE, 10, 10),
    "time": Pattern(_TIME, 9, 21),
    "date-time": Pattern(f"{_DATE}T{_TIME}", 20, 32),
    "uuid": Pattern(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", 36, 36),
    "email": Pattern(rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+", 5, None),
    "ipv4": Pattern(_IPV4, 7, 15),
    "uri": Pattern(
        rf"(?:https?|ftp)://{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,5}})?(?:/{_PATH}*)*"
        rf"(?:\?(?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?",
        7,
        None,
    ),
}

REFUSED = {
    "duration",
    "hostname",
    "idn-email",
    "idn-hostname",
    "ipv6",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
}
"""Other formats that JSON Schema defines. Names that it does not define assert nothing."""

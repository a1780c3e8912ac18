"""An agent with three local tools on the embedded model, and where its time went.

Run ``make demo``, or ``python examples/agent_loop.py [--repeats 5]``; what it runs stands in
``langchain_agentspec/demo.py``, so that ``agentspec demo`` can run it too.
"""

from __future__ import annotations

import argparse

from langchain_agentspec.demo import (
    PRICES,
    RATES,
    convert_dollars,
    get_price,
    keep_course,
    list_items,
    play,
    run,
    show,
)

__all__ = ["PRICES", "RATES", "convert_dollars", "get_price", "keep_course", "list_items", "play", "run", "show"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs with and without speculation for the ratio")
    play(parser.parse_args().repeats)


if __name__ == "__main__":
    main()

"""Two roles argue on one engine, and a vote of several samples decides.

Run ``python examples/debate.py [question] [--rounds 2]``. Both roles and the jury are one model, loaded once: their
prompts share a KV cache, so that each turn reads only what is new, and the jury's samples are drawn together. What a
model of 135M parameters argues is not to be taken seriously; the account of where the time went is.
"""

from __future__ import annotations

import argparse

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from langchain_agentspec import ChatAgentSpec, ConsistencyResult, SelfConsistency, track_latency

ROLES = {
    "for": "You argue for yes. Answer the last argument in one or two short sentences.",
    "against": "You argue for no. Answer the last argument in one or two short sentences.",
}


def seen_by(role: str, question: str, said: list[tuple[str, str]]) -> list[BaseMessage]:
    """The debate as one role sees it: its own turns are the assistant's."""
    messages: list[BaseMessage] = [SystemMessage(ROLES[role]), HumanMessage(question)]
    return messages + [AIMessage(text) if who == role else HumanMessage(text) for who, text in said]


def debate(model: ChatAgentSpec, question: str, rounds: int) -> list[tuple[str, str]]:
    """The arguments, by role."""
    said: list[tuple[str, str]] = []
    for _ in range(rounds):
        for role in ROLES:
            said.append((role, model.invoke(seen_by(role, question, said)).text.strip()))
    return said


def verdict(model: ChatAgentSpec, question: str, said: list[tuple[str, str]], k: int) -> ConsistencyResult:
    """What most of ``k`` jurors say."""
    arguments = "\n".join(f"{role}: {text}" for role, text in said)
    schema = {
        "title": "Verification",
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
    }
    jury = SelfConsistency(model.with_structured_output(schema), k, seed=1, stop="adaptive", return_all=True)
    result: ConsistencyResult = jury.invoke(f"{question}\n\n{arguments}\n\nWhich side is right?")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="Should every town have a library?")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jurors", type=int, default=8)
    options = parser.parse_args()
    model = ChatAgentSpec(temperature=0.7, seed=3, max_tokens=60, frequency_penalty=0.4).load()
    print(options.question)
    with track_latency("debate") as run:
        said = debate(model, options.question, options.rounds)
        result = verdict(model, options.question, said, options.jurors)
    for role, text in said:
        print(f"{role:>8}  {text}")
    print(f"\nverdict: {result.answer['answer']} ({result.share:.0%} of {len(result.samples)} votes)")
    run.print()


if __name__ == "__main__":
    main()

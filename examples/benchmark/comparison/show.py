"""The findings as a table and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def table(findings: dict[str, Any]) -> str:
    """All findings as text."""
    titles = {name: about["title"] for name, about in findings["systems"].items()}
    parts = [_systems(findings)]
    parts += [_workload(name, work, titles) for name, work in findings["workloads"].items()]
    parts += [f"{name}: skipped, {reason}" for name, reason in findings["skipped"].items()]
    return "\n\n".join(parts)


def _systems(findings: dict[str, Any]) -> str:
    lines = [", ".join(str(value) for value in findings["machine"].values())]
    for about in findings["systems"].values():
        if about["reason"] is not None:
            lines.append(f"{about['title']}: not started, {about['reason']}")
        elif about["about"] is not None:
            lines.append(f"{about['title']}: {about['about']}")
    return "\n".join(lines)


def _workload(name: str, work: dict[str, Any], titles: dict[str, str]) -> str:
    head = f"{name} ({work['title']}): {len(work['rows'])} rows, {work['requests']} requests, {work['repeats']} repeats"
    lines = [f"{head}, prompts of {work['prompt_tokens']} tokens in all"]
    lines.append(f"  {'':38s} {'seconds':>8s} {'tokens':>7s} {'tok/s':>7s}   how many times faster is agentspec")
    lines.append(f"  {'':63s}  median [95 % interval], in total; without reading prompts")
    for system, of in work["systems"].items():
        if of["status"] == "failed":
            lines.append(f"  {titles[system]:38s} failed: {of['reason'][:160]}")
        elif of["status"] == "ran":
            figures = f"{of['median_s']:8.2f} {of['median_tokens']:7.0f} {of['tokens_per_s']:7.1f}"
            lines.append(f"  {titles[system]:38s} {figures}   {_ratios(work['ratios'].get(system))}")
    absent = [f"{name} ({of['reason']})" for name, of in work["systems"].items() if of["status"] == "no part"]
    lines += [f"  without {', '.join(absent)}"] if absent else []
    return "\n".join(lines + _equality(work) + _account(work))


def _ratios(ratios: dict[str, Any] | None) -> str:
    known = [ratios[name] for name in ("end_to_end", "without_prompts")] if ratios else []
    return "; ".join(_ratio(ratio) for ratio in known if ratio is not None)


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:5.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}], {ratio['total']:5.2f}"


def _equality(work: dict[str, Any]) -> list[str]:
    equality = work["equality"]
    if equality is None:
        return []
    lines = [f"  texts against {equality['reference']}:"]
    for system, count in equality["systems"].items():
        note = "" if count["should_be_equal"] else " (other weights or kernels: may differ)"
        lines.append(f"    {system}: {count['differing']} of {count['answers']} differ{note}")
    for at in equality["differences"]:
        gap = "one text ends" if at["gap"] is None else f"gap {at['gap']:.1e} logits"
        lines.append(
            f"    {at['system']} parts in row {at['row']}, request {at['item']}, token {at['position']}: {gap}"
        )
    return lines


def _account(work: dict[str, Any]) -> list[str]:
    lines = []
    if (theory := work["theory"]) is not None:
        promised = [
            f"{title} {theory[name]:.2f} (measured/formula {theory[f'measured_over_{name}']:.2f})"
            for name, title in (("paper", "paper"), ("paper_at_v", "paper at v"), ("by_cost", "cost table"))
            if name in theory
        ]
        lines.append(
            f"  gain of speculation in the rounds: measured {theory['measured']:.2f}; {', '.join(promised)}; "
            f"alpha {theory['alpha']:.2f}, gamma {theory['gamma']:.1f}, c {theory['c']:.3f}, v {theory['v']:.2f}, "
            f"{theory['tokens_per_round']:.2f} tokens a round"
        )
    for system, shares in work["overhead"].items():
        phases = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if name != "outside_target")
        lines.append(f"  outside the target's pass, {system}: {shares['outside_target']:.1%} of the rounds ({phases})")
    for system, reuse in work["prefix_reuse"].items():
        lines.append(
            f"  prompt tokens computed, {system}: {reuse['computed_tokens']} of {reuse['prompt_tokens']} "
            f"({reuse['computed_share']:.1%})"
        )
    return lines


def plot(findings: dict[str, Any], path: Path) -> None:
    """Bars: how many times faster agentspec is than each system, end to end, by workload; with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = {name: work for name, work in findings["workloads"].items() if work["ratios"]}
    systems = [name for name in findings["systems"] if any(name in work["ratios"] for work in works.values())]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.28 * sum(len(work["ratios"]) + 1 for work in works.values())))
    at, ticks, labels = 0.0, [], []
    colours = pyplot.get_cmap("tab10")
    seen = set()
    for name, work in works.items():
        begin = at
        for system, ratios in work["ratios"].items():
            ratio = ratios["end_to_end"]
            colour = systems.index(system)
            axes.barh(
                at,
                ratio["median"],
                0.8,
                color=colours(colour % 10),
                xerr=[[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]],
                error_kw={"elinewidth": 0.8},
                label=None if system in seen else findings["systems"][system]["title"],
            )
            axes.text(ratio["high"], at, f" {ratio['median']:.2f}", va="center", fontsize=7)
            seen.add(system)
            at += 1
        ticks.append((begin + at - 1) / 2)
        labels.append(f"{name}\n{work['title']}")
        at += 1
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.set_xlabel("how many times faster agentspec is, end to end (median of paired ratios, 95 % interval)")
    axes.legend(fontsize=7, loc="best")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

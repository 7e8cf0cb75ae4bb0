"""The generated parts of docs/results.md on expected losses, and their picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from frame.page import picture, table

from megatron_edit.tools.pages.drawing import COLORS

from .answers import (
    PUBLISHED,
    Answers,
    Line,
    PowerLaw,
    bytes_over_plain,
    gap,
    loss_ratio,
    make_targets,
    num_parameters,
)
from .study import (
    CLEAN,
    HIDDEN_SIZES,
    LARGER_BETA2,
    LONG,
    MUON_RATE,
    MUON_SCALE,
    NUM_REPLICAS,
    SAMPLES,
    SHORT,
    muon,
    plain,
    recommended,
    samples_labels,
    sizes_labels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK = "<!-- {name}: made by benchmarks/convergence.py --report -->"
END = "<!-- end of {name} -->"
LAW_SIZES = (1.1e6, 1e8, 1e9, 7e9)
LAW_REPLICAS = (2, 4, 8, 16)


def make_blocks(answers: Answers, drawing: str) -> dict[str, str]:
    """Return the text of each generated part, by name.

    Args:
        answers: from the finished runs.
        drawing: link to the picture; "" where there is none.
    """
    return {"expectations": _expectations(answers, drawing), "single seeds": _choices(answers)}


def replace_blocks(page: str, texts: dict[str, str]) -> str:
    """Return a page with these parts replaced.

    Raises:
        ValueError: the page has no markers for a part.
    """
    for name, text in texts.items():
        begin, end = BLOCK.format(name=name), END.format(name=name)
        before, found_begin, rest = page.partition(f"{begin}\n")
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise ValueError(f"the page must have a part {begin} ... {end}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def _expectations(answers: Answers, drawing: str) -> str:
    size = answers.study.size
    baseline = answers.baseline
    better = "" if baseline is None else f" (here {baseline.member.label})"
    intro = (
        f"A GPT of {size.num_layers} layers, hidden size {size.hidden_size}; {NUM_REPLICAS} "
        f"replicas, {size.train_iters} steps of {size.micro_batch_size} samples of "
        f"{size.seq_length} tokens for each, tau 16 and a warm-up of 10 % of the steps "
        "unless stated otherwise. *Recommended* is "
        "[configs/edit_quality.args](../configs/edit_quality.args). *Relative to DDP*: loss at "
        f"equal tokens over that of stock DDP with AdamW at the better of two beta2{better}, seed "
        "by seed, mean ± standard deviation. *Bytes*: sent by a replica in the run, warm-up and "
        "final phase included, over those of plain EDiT with the same tau; estimated from the "
        "flags. Rows with one seed are only an indication."
    )
    shown = (
        [f"![Loss relative to stock DDP, by tau, samples and size]({drawing})"] if drawing else []
    )
    return "\n\n".join([
        intro, *shown,
        "### The recommended setting", _claims(answers),
        "### Samples per replica and step", _samples(answers),
        "### Size of the model and number of replicas", _sizes(answers),
        "### An estimate for other trainings", _estimate(answers),
        "### Muon", _muon(answers),
        "### Random tokens in bursts on one of four replicas", _bad_data(answers),
        "### Targets", _targets(answers),
    ])  # fmt: skip


def _claims(answers: Answers) -> str:
    return _losses(answers.lines("quality"), answers.baseline)


def _losses(lines: Sequence[Line], base: Line | None, *more: Line) -> str:
    """Return a table of the lines with runs, compared with other members, and the missing runs.

    Args:
        lines: of one question.
        base: baseline of the DDP column.
        more: further members to compare with, a column each.
    """
    columns = [f"relative to {each.member.label}" for each in more]
    header = ["", "validation loss", "relative to DDP", *columns, "bytes", "seeds"]
    rows = []
    for line in lines:
        if line.loss is not None:
            others = [_gap_text(line, each) for each in (base, *more)]
            case = line.member.cases[0]
            sent = f"{bytes_over_plain(case):.2f}" if case.strategy != "ddp" else ""
            loss = line.loss.text("{:.4f}".format)
            rows.append([line.member.label, loss, *others, sent, str(line.loss.num)])
    return _with_missing(table(header, rows) if rows else "", lines)


def _with_missing(text: str, lines: Sequence[Line]) -> str:
    missing = [f"{line.member.label} ({len(line.records)} of {line.planned})"
               for line in lines if len(line.records) < line.planned]  # fmt: skip
    rest = [f"Runs missing: {'; '.join(missing)}."] if missing else []
    return "\n\n".join([*([text] if text else []), *rest])


def _gap_text(line: Line, base: Line | None) -> str:
    spread = None if base is None or line.member.cases == base.member.cases else gap(line, base)
    return "" if spread is None else spread.text("{:+.2%}".format).replace("± +", "± ")


def _pairs(
    answers: Answers, question: str, labels: Sequence[tuple[str, str]], heads: Sequence[str]
) -> list[list[str]]:
    """Return a row for each pair with a run: head, loss of DDP and of EDiT, and the gap."""
    rows = []
    for head, pair in zip(heads, labels, strict=True):
        ddp, edit = (answers.line(question, label) for label in pair)
        texts = ["" if x.loss is None else x.loss.text("{:.4f}".format) for x in (ddp, edit)]
        if any(texts):
            rows.append([head, *texts, _gap_text(edit, ddp)])
    return rows


def _samples(answers: Answers) -> str:
    labels = [samples_labels(samples) for samples in SAMPLES]
    rows = _pairs(answers, "quality-samples", labels, list(map(str, SAMPLES)))
    header = ["samples", "stock DDP", "recommended", "relative to DDP"]
    parts = [table(header, rows)] if rows else []
    if (law := answers.samples_law()) is not None:
        parts.append(
            f"Fit (least squares, {len(answers.sample_gaps())} points): gap = "
            f"{law.scale:.3f} samples^{law.exponent:.2f}."
        )
    text = f"One seed; DDP with beta2 {LARGER_BETA2}."
    return _with_missing("\n\n".join([text, *parts]), answers.lines("quality-samples"))


def _sizes(answers: Answers) -> str:
    labels = [sizes_labels(hidden) for hidden in HIDDEN_SIZES]
    heads, laws = [], []
    for (ddp, _), hidden in zip(labels, HIDDEN_SIZES, strict=True):
        numel = num_parameters(answers.line("quality-sizes", ddp))
        heads.append(f"{hidden}" if numel is None else f"{numel / 1e6:.1f}M")
        ratio = 0.0 if numel is None else loss_ratio(PUBLISHED, NUM_REPLICAS, numel)
        laws.append((heads[-1], f"{ratio - 1:+.1%}"))
    rows = _pairs(answers, "quality-sizes", labels, heads)
    rows = [[*row, dict(laws)[row[0]]] for row in rows]
    header = ["parameters", "stock DDP", "recommended", "relative to DDP", "published law"]
    parts = [table(header, rows)] if rows else []
    parts.append(
        "Published law (arXiv 2503.09799, fit to its Table 4, of DiLoCo): loss over that of data "
        f"parallelism = N^({PUBLISHED.scale:g} P^{PUBLISHED.exponent:g})."
    )
    num_sizes = len(answers.size_gaps())
    if (law := answers.size_law()) is not None:
        parts.append(
            f"The same form through the {num_sizes} sizes here: "
            f"N^({law.scale:.3g} P^{law.exponent:.3f}), at N = {NUM_REPLICAS}, one seed, one "
            "learning rate for all sizes: do not extrapolate it far."
        )
    elif num_sizes > 1:
        size = answers.study.size
        tokens = size.train_iters * NUM_REPLICAS * size.micro_batch_size * size.seq_length
        parts.append(
            f"The {num_sizes} sizes here do not follow a law of this form: the gap does not fall "
            "with the size. All of them have one seed, the same learning rate and the same "
            f"{tokens / 1e6:.1f}M tokens, while the models of the law were trained on tokens in "
            "proportion to their parameters, at learning rates of their own. Whether that is the "
            "cause has not been measured."
        )
    parts.append(_law_table())
    text = f"One seed; DDP with beta2 {LARGER_BETA2}."
    return _with_missing("\n\n".join([text, *parts]), answers.lines("quality-sizes"))


def _estimate(answers: Answers) -> str:
    by_size, by_samples, size = answers.size_law(), answers.samples_law(), answers.study.size
    gaps = [gap(answers.line("quality", recommended(tau)), answers.baseline)
            for tau in (SHORT, LONG)]  # fmt: skip
    if by_samples is None or None in gaps:
        return "Needs the runs of the three sections above."
    short, long = (spread.mean for spread in gaps if spread is not None)
    factor, parameters = f"{short:.2%} of the model above and N = {NUM_REPLICAS}", "S"
    if by_size is not None:
        factor = f"(N^({by_size.scale:.3g} P^{by_size.exponent:.3f}) - 1)"
        parameters = "P: parameters; s"
    return (
        f"gap = {factor}, times (samples / {size.micro_batch_size})^{by_samples.exponent:.2f}, at "
        f"tau {SHORT}; times {long / short:.1f} at tau {LONG}. {parameters}amples: per replica "
        f"and step, {size.seq_length} tokens each. Each factor was measured with the others "
        "constant, at one N; products of them have not been measured. For more than ten million "
        "parameters the published law above is the better guide."
    )


def _law_table() -> str:
    header = ["published law", *(f"N = {n}" for n in LAW_REPLICAS)]
    rows = []
    for numel in LAW_SIZES:
        head = f"{numel / 1e6:g}M" if numel < 1e9 else f"{numel / 1e9:g}B"
        gaps = [f"{loss_ratio(PUBLISHED, n, numel) - 1:+.1%}" for n in LAW_REPLICAS]
        rows.append([head, *gaps])
    return table(header, rows)


def _muon(answers: Answers) -> str:
    text = (
        f"`--optimizer muon`, peak rate {MUON_RATE:g}, `--muon-extra-scale-factor {MUON_SCALE}`, "
        "outer learning rate 0.9, outer momentum 0.6; other rates and scales where a row states "
        "them. **The scale and the rate were chosen with knowledge of the losses with and without "
        "them**, on these data and seed 1, for stock DDP with Muon. The bytes assume two moments "
        "per parameter; Muon's matrices have one, so they are an upper bound."
    )
    lines = answers.lines("quality-muon")
    muon_ddp = answers.line("quality-muon", muon("ddp"))
    return f"{text}\n\n{_losses(lines, answers.baseline, muon_ddp)}"


def _bad_data(answers: Answers) -> str:
    lines = answers.lines("quality-bursts")
    clean = answers.line("quality-bursts", CLEAN)
    rows = [
        [line.member.label, line.loss.text("{:.4f}".format), _gap_text(line, clean), line.left_out,
         str(line.loss.num)]
        for line in lines if line.loss is not None
    ]  # fmt: skip
    header = ["", "validation loss", "relative to clean", "left out, by replica", "seeds"]
    return _with_missing(table(header, rows) if rows else "", lines)


def _targets(answers: Answers) -> str:
    rows = [[each.what, each.wanted, each.found, each.verdict] for each in make_targets(answers)]
    return table(["", "target", "measured", ""], rows)


def _choices(answers: Answers) -> str:
    lines = answers.lines("quality-choices")
    rows = []
    for line in lines:
        if line.loss is not None:
            base = line.member.base
            difference = "" if line.relative is None else f"{line.relative.mean:+.2%} to {base}"
            sent = f"{bytes_over_plain(line.member.cases[0]):.2f}"
            rows.append([line.member.label, f"{line.loss.mean:.4f}", difference, sent])
    header = ["", "validation loss", "difference", "bytes"]
    return _with_missing(table(header, rows) if rows else "", lines)


Panel = Callable[["Axes"], None]


def draw_gaps(path: Path, answers: Answers) -> bool:
    """Write the picture: a panel for each axis with finished runs; False if there is none."""
    candidates = (_tau_panel(answers), _samples_panel(answers), _size_panel(answers))
    panels = [panel for panel in candidates
              if panel is not None]  # fmt: skip
    if not panels:
        return False
    width = 5 * len(panels)
    options = {"figsize": (width, 4), "facecolor": "white", "squeeze": False}
    with picture(path, dpi=110, ncols=len(panels), **options) as (_, grid):
        for axes, panel in zip(grid.flat, panels, strict=True):
            panel(axes)
            axes.axhline(0, color="black", linewidth=0.8, linestyle=":")
            axes.set_ylabel("validation loss relative to stock DDP (%)")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    return True


def tau_series(answers: Answers) -> dict[str, list[tuple[float, float, float]]]:
    """Return by label: tau, the gap to DDP with the same inner optimizer, and its deviation."""
    muon_ddp = answers.line("quality-muon", muon("ddp"))
    wanted = {
        "EDiT": ("quality", plain, answers.baseline),
        "recommended setting": ("quality", recommended, answers.baseline),
        "recommended, Muon relative to Muon": (
            "quality-muon", lambda tau: muon(recommended(tau)), muon_ddp,
        ),
    }  # fmt: skip
    found: dict[str, list[tuple[float, float, float]]] = {}
    for label, (question, name, base) in wanted.items():
        for tau in (SHORT, LONG):
            if (spread := gap(answers.line(question, name(tau)), base)) is not None:
                point = (float(tau), spread.mean, spread.deviation or 0.0)
                found.setdefault(label, []).append(point)
    return found


def _tau_panel(answers: Answers) -> Panel | None:
    series = tau_series(answers)

    def panel(axes: Axes) -> None:
        for number, (label, points) in enumerate(series.items()):
            taus, means, deviations = zip(*points, strict=True)
            axes.errorbar(taus, _percent(means), yerr=_percent(deviations), fmt="o-", capsize=3,
                          color=COLORS[number], label=label)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks([SHORT, LONG], [str(SHORT), str(LONG)])
        axes.set_xlabel("tau, steps between two syncs")

    return panel if series else None


def _samples_panel(answers: Answers) -> Panel | None:
    points = answers.sample_gaps()
    law = answers.samples_law()

    def panel(axes: Axes) -> None:
        _plot_points(axes, points, "recommended setting, one seed")
        if law is not None:
            _plot_law(axes, points, law.at, "fit")
        axes.set_xscale("log", base=2)
        axes.set_xticks([n for n, _ in points], [str(int(n)) for n, _ in points])
        axes.set_xlabel("samples per replica and step")

    return panel if points else None


def _size_panel(answers: Answers) -> Panel | None:
    points, law = answers.size_gaps(), answers.size_law()

    def panel(axes: Axes) -> None:
        _plot_points(axes, points, "recommended setting, one seed")
        if law is not None:
            _plot_law(axes, points, lambda numel: _gap_of(law, numel), "fit")
        _plot_law(axes, points, lambda numel: _gap_of(PUBLISHED, numel), "DiLoCo, 2503.09799")
        axes.set_xscale("log")
        axes.set_xlabel("parameters of the model")

    return panel if points else None


def _gap_of(law: PowerLaw, num_parameters: float) -> float:
    return loss_ratio(law, NUM_REPLICAS, num_parameters) - 1


def _plot_points(axes: Axes, points: Sequence[tuple[float, float]], label: str) -> None:
    places, gaps = zip(*points, strict=True)
    axes.plot(places, _percent(gaps), "o", color=COLORS[0], label=label)


def _plot_law(
    axes: Axes, points: Sequence[tuple[float, float]], law: Callable[[float], float], label: str
) -> None:
    ends = [place for place, _ in points]
    places = np.geomspace(min(ends), max(ends), 100).tolist()
    style = "-" if label == "fit" else "--"
    axes.plot(places, _percent([law(place) for place in places]), style, label=label)


def _percent(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]

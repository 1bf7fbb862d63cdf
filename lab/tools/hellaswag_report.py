"""What hellaswag.py shows of a model's answers: as text, one line of JSON, tables, a picture."""

import json

import numpy as np

from lab.cli import UserError
from lab.data.hellaswag import is_published, source_of
from lab.files import check_writable, writing
from lab.tools.plot_style import color_of, style


def check_picture(path):
    """Raise UserError where it cannot be written, before minutes of scores are lost with it."""
    if not path.endswith((".png", ".svg", ".pdf")):
        raise UserError(f"picture={path} must end in .png, .svg or .pdf")
    check_writable(path, "picture")


def report(cfg, path, precision, result, data, sums, summarise):
    """Print what was asked for, and draw. summarise is hellaswag.py's."""
    published = is_published(path)
    sources = [source_of(row) for row in data.rows]
    activities = [str(row.get("activity_label")) for row in data.rows]
    names = {"by_source": sources, "by_activity": activities}
    groups = {k: by_group(v, sums, data, summarise) for k, v in names.items()}
    asked = {k: v for k, v in groups.items() if getattr(cfg, k)}
    worst = most_sure_and_wrong(sums, data, cfg.worst)
    if cfg.json:
        about = {"model": cfg.model, "split": cfg.split, "published_file": published}
        record = about | {"precision": precision} | result | asked
        print(json.dumps(record | ({"worst": worst} if cfg.worst else {})), flush=True)
    else:
        for name in ("acc", "acc_norm"):
            numbers = [result[name + part] for part in ("", "_stderr", "_low", "_high")]
            print("{:8}  {:.4f} +- {:.4f}  (95 %: {:.4f} to {:.4f})".format(name, *numbers))
        line = f"{result['count']} examples of {path} in {result['seconds']:.1f} s, {precision}"
        line += f"; {result['cut']} contexts cut from the left to fit" if result["cut"] else ""
        line += f"; {result['skipped']} left out, too long an ending" if result["skipped"] else ""
        print(line + ("" if published else "; not the published file, nor comparable with it"))
        for text in [table(g) for g in asked.values()] + [describe(e) for e in worst]:
            print("\n" + text)
    if cfg.picture:
        largest = list(groups["by_activity"].items())[:25]
        draw(groups["by_source"] | dict(largest), result, cfg)


def by_group(names, sums, data, summarise):
    """{name: summary} of the examples that share a name, the largest group first."""
    found, where, counts = np.unique(names, return_inverse=True, return_counts=True)
    groups = {found[i].item(): where == i for i in np.argsort(-counts, kind="stable")}
    return {name: summarise(sums[i], data.end_len[i], data.label[i]) for name, i in groups.items()}


def most_sure_and_wrong(sums, data, count):
    """The examples whose wrong ending beats the right one by the most nats a token, with that
    margin and the mean losses."""
    means = sums / data.end_len
    margin = means[np.arange(len(data)), data.label] - means.min(1)
    order = [i for i in np.argsort(-margin, kind="stable")[:count] if margin[i] > 0]
    return [
        data.rows[i] | {"margin": float(margin[i]), "mean_losses": means[i].tolist()} for i in order
    ]


def table(groups):
    width = max(map(len, groups))
    rows = [f"{'':{width}}  count     acc  acc_norm  95 % interval"]
    for name, g in groups.items():
        low, high = g["acc_norm_low"], g["acc_norm_high"]
        scores = f"{g['count']:5d}  {g['acc']:.4f}    {g['acc_norm']:.4f}  {low:.3f} to {high:.3f}"
        rows.append(f"{name:{width}}  {scores}")
    return "\n".join(rows)


def describe(example):
    """A wrong choice as text: the right ending marked =, the chosen one >, with mean losses."""
    losses = example["mean_losses"]
    lines = [
        f"line {example['line']}, {example.get('activity_label')}, surer of the wrong one by "
        f"{example['margin']:.2f} nats a token\n    {example['ctx']}"
    ]
    for j, text in enumerate(example["endings"]):
        mark = "=" if j == example["label"] else ">" if losses[j] == min(losses) else " "
        lines.append(f"  {mark} {losses[j]:5.2f}  {text}")
    return "\n".join(lines)


def draw(groups, result, cfg):
    """Bars of the groups' acc_norm with 95 % intervals, as a picture."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = [f"{name} ({g['count']})" for name, g in groups.items()]
    values = np.array([g["acc_norm"] for g in groups.values()])
    bounds = np.array([(g["acc_norm_low"], g["acc_norm_high"]) for g in groups.values()]).T
    with rc_context(style() | {"figure.figsize": (8, 1.4 + 0.26 * len(groups))}):
        figure = Figure()
        ax = figure.subplots()
        ax.barh(labels, values, xerr=abs(bounds - values), color=color_of("accuracy"), ecolor="0.3")
        ax.axvline(0.25, ls=":", color="0.5", label="chance")
        ax.axvline(result["acc_norm"], ls="--", color="0.5", label="all")
        ax.invert_yaxis()
        title = f"{cfg.model}: right in {result['acc_norm']:.1%} of {result['count']} (acc_norm)"
        ax.set(xlabel="acc_norm, with 95 % interval", title=title)
        figure.legend(loc="outside lower right", ncols=2)  # on no bar
        with writing(cfg.picture):
            figure.savefig(cfg.picture)

"""The runs that lab report shows: log.jsonl, config.json, and what can be compared between two of them."""

from collections.abc import Sequence
from pathlib import Path

from lab.files import read_json
from lab.tools import read_log
from lab.tools.read_log import Record, RunLog, comparable, objectives, same_data


class RunReport:
    """The data of a run for the page.

    folder: the run directory, or that of a copied log. config: {"program": {field: value}, "model": ...,
    "train": ...}, or empty without a config.json.
    """

    def __init__(self, name: str, folder: Path, log: RunLog, config: dict[str, dict]):
        self.name, self.folder, self.log, self.config = name, folder, log, config
        self.all = [record for kind in log.values() for record in kind]
        self.start, self.train = log.get("start", [{}])[-1], config.get("train", {})
        self.tokens = tokens = read_log.tokens_at(log)  # training tokens up to a step, or None
        self.failed = read_log.failed_step(log)
        self.last = self.failed or max(record["step"] for record in self.all)
        self.minutes = clock(self.all)
        self.axes = {  # {axis: a record's position on it}
            "step": lambda record: record["step"],
            "time": lambda record: round(self.minutes[record["time"]], 4),
        }
        if tokens:
            self.axes["tokens"] = lambda record: tokens(record["step"])


def clock(records: list[Record]) -> dict[float, float]:
    """{time of a record: minutes since the run started}, including evaluation and saving, but not the
    time between a stop and --resume."""
    in_order, minutes, total = sorted(records, key=lambda r: r["time"]), {}, 0.0
    for before, record in zip([in_order[0], *in_order], in_order):
        if record["kind"] != "start":
            total += (record["time"] - before["time"]) / 60
        minutes[record["time"]] = total
    return minutes


def read_run(path: Path, name: str) -> RunReport:
    """Read a run directory or a log file. Raises UserError if there is no log, if it has no
    measurement yet, or if config.json is damaged."""
    log, config = read_log.read_log(path), {}
    folder = path if path.is_dir() else path.parent
    beside = folder / "config.json"
    if beside.exists() and (path.is_dir() or path.name == "log.jsonl"):  # not for a copied log
        hint = "delete it to get a page without the configuration"
        config = read_json(beside, hint, model=dict, train=dict)
    parts = {part: config[part] for part in ("model", "train") if config}
    program = config.get("program")
    if isinstance(program, dict):
        file, code = str(program.get("trainer")).rpartition(":")[0], str(program.get("code", ""))
        parts = {"program": {"file": file, "hash of the model's code": code[:8]}} | parts
    return RunReport(name, folder, log, parts)


def mismatch(runs: Sequence[RunReport]) -> str:
    """The difference between runs because of which their losses cannot be compared: "objectives",
    "tokenizers" or "data"; "" if there is none."""
    logs = [run.log for run in runs]
    if len(objectives(logs)) == 2:
        return "objectives"
    if not comparable(logs):
        return "tokenizers"
    return "" if same_data(logs, [run.train.get("data") for run in runs]) else "data"

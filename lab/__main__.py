"""Command line of the tools: python -m lab report log/RUN (from other folders: python /path/to/lab ...)."""

import importlib
import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from lab.cli import UserError, check_python, run_main, set_omp_wait_policy

TOOLS = {
    "export": "write a model as a folder for transformers, or as a web page",
    "plan": "estimate a run's memory, time and cost",
    "plot": "draw the curves of one or several runs",
    "replay": "repeat the step of a gradient spike, with the loss of each sequence",
    "report": "make an HTML page of one run, or of two side by side",
    "serve": "serve a model: a web page, and an API like OpenAI's",
}


def main(argv: list[str]) -> int | None:
    """Run the tool that argv names, or print the list of tools."""
    check_python()
    name = argv[0] if argv else "--help"
    if name in TOOLS:
        set_omp_wait_policy()  # must run before torch is imported
        module = "lab.hf.export" if name == "export" else f"lab.tools.{name}"
        try:
            return importlib.import_module(module).main(argv[1:])
        except ModuleNotFoundError as error:  # usually the virtual environment is not activated
            if not error.name or error.name.startswith("lab"):
                raise
            raise UserError(
                f"{error.name} is not installed for this Python; run `make train` once, then use "
                ".venv/bin/python, or `pip install -r requirements.txt`"
            ) from None
    wrong = name not in ("-h", "--help")
    lines = "\n".join(f"  {tool:8} {text}" for tool, text in TOOLS.items())
    print(
        f"error: there is no tool {name}\n" * wrong + "usage: python -m lab TOOL ...\n\n"
        f"{lines}\n\npython -m lab TOOL --help lists the flags of a tool",
        file=sys.stderr if wrong else sys.stdout,
    )
    return 2 if wrong else 0


if __name__ == "__main__":
    run_main(main, name=f"lab {sys.argv[1]}" if sys.argv[1:] else "lab")

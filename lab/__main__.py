"""One door to the tools: python -m lab report log/RUN; elsewhere python /path/to/lab report log/RUN."""

import importlib
import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from lab.cli import command, set_threads

TOOLS = {
    "export": "write a model as a folder that transformers loads",
    "plan": "would a run fit, how long would it take, what would it cost?",
    "plot": "the curves of one or several runs in one picture",
    "replay": "the step of a spike again, with the loss of each sequence",
    "report": "a page of one run, or of two beside each other",
    "serve": "a page to talk to a model, and OpenAI's interface to it",
}


def main(argv):
    name = argv[0] if argv else "--help"
    if name in TOOLS:
        set_threads()  # as the trainer has them
        return importlib.import_module(f"lab.tools.{name}").main(argv[1:])
    wrong = name not in ("-h", "--help")
    lines = "\n".join(f"  {tool:8} {text}" for tool, text in TOOLS.items())
    print(
        f"error: there is no tool {name}\n" * wrong + "usage: python -m lab TOOL ...\n\n"
        f"{lines}\n\npython -m lab TOOL --help lists the flags of one",
        file=sys.stderr if wrong else sys.stdout,
    )
    return 2 if wrong else 0


if __name__ == "__main__":
    command(main, name=f"lab {sys.argv[1]}" if sys.argv[1:] else "lab")

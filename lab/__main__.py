"""One door to the tools: python -m lab report log/RUN, or from another folder python /path/to/lab report log/RUN."""

import importlib
import os
import sys

TOOLS = {
    "export": ("lab.weights", "write a model as a folder that transformers loads"),
    "plan": ("lab.tools.plan", "would a run fit, how long would it take, what would it cost?"),
    "plot": ("lab.tools.plot", "the curves of one or several runs in one picture"),
    "report": ("lab.tools.report", "a page of one run, or of two beside each other"),
}


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in TOOLS:
        lines = "".join(f"  {tool:8} {text}\n" for tool, (_, text) in TOOLS.items())
        wrong = "" if name in ("-h", "--help") else f"error: there is no tool {name}\n"
        print(f"{wrong}usage: python -m lab TOOL ...\n\n{lines}\npython -m lab TOOL --help lists the flags of one",
              file=sys.stderr if wrong else sys.stdout)  # fmt: skip
        return 2 if wrong else 0
    sys.argv[:2] = [f"python -m lab {name}"]
    return importlib.import_module(TOOLS[name][0]).main()


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # also where this folder itself is run
    sys.exit(main())

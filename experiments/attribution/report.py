"""report.md and the figure, from results.json."""

FIGURES = {}


def report(results):
    return ["# x", ""] + [f"- {name}: {cell['summary']}" for name, cell in results["cells"].items()]

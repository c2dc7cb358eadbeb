"""A DAG as people look at it: as a tree of jobs, and as the YAML that would make it.

`show` prints every job once, below one of those that it reads from, and names the others.
`render` writes the YAML of a stored version; parsing it gives the same DAG again.
"""

from __future__ import annotations

import yaml

from penstock.dispatcher.dag.canonical import ESCAPED_IN_YAML, Plain, plain
from penstock.dispatcher.dag.graph import Graph
from penstock.dispatcher.dag.model import CronSource, Dag, Emits, Job, Priority, WebhookSource
from penstock.dispatcher.dag.nodes import scalar_value


def show(dag: Dag) -> str:
    """The jobs as a tree, sources first, one a line."""
    graph = Graph(dag)
    jobs = {job.name: job for job in dag.jobs}
    depths: dict[str, int] = {}
    children: dict[str, list[str]] = {name: [] for name in jobs}
    order = graph.order()
    for name in order:
        # Below the deepest of its feeders, which is the nearest in most DAGs.
        feeders = graph.feeders[name]
        if not feeders:
            depths[name] = 0
            continue
        parent = max(feeders, key=lambda each: (depths[each], each))
        depths[name] = depths[parent] + 1
        children[parent].append(name)
    lines: list[tuple[str, str]] = []
    waiting = [(name, "", "") for name in reversed(order) if not graph.feeders[name]]
    while waiting:
        name, lead, below = waiting.pop()
        lines.append((lead + name, _described(jobs[name], graph)))
        last = len(children[name]) - 1
        for number, child in reversed(list(enumerate(children[name]))):
            tee, bar = ("└─ ", "   ") if number == last else ("├─ ", "│  ")
            waiting.append((child, below + tee, below + bar))
    width = max((len(tree) for tree, _ in lines), default=0)
    return "".join(f"{tree:<{width}}  {text}".rstrip() + "\n" for tree, text in lines)


def _described(job: Job, graph: Graph) -> str:
    parts = [_what(job)]
    if len(graph.feeders[job.name]) > 1:
        parts.append(f"reads {', '.join(graph.feeders[job.name])}")
    if job.outputs:
        parts.append(f"writes {', '.join(output.dataset for output in job.outputs)}")
    if job.priority is Priority.BULK:
        parts.append("bulk")
    if job.secrets:
        parts.append(f"secrets {', '.join(sorted(job.secrets))}")
    if job.untrusted:
        parts.append("untrusted")
    return "; ".join(filter(None, parts))


def _what(job: Job) -> str:
    ran = f"{job.runtime} {job.operator}".strip()
    match job.source:
        case None:
            return ran
        case CronSource(cron, zone, emits):
            intervals = ", intervals" if emits is Emits.INTERVAL else ""
            return f"cron {cron.expression} {zone}{intervals}"
        case WebhookSource(path, auth):
            return f"webhook {path} {'without auth' if auth is None else f'({auth.type})'}"
        case source:
            return f"{source.kind} {ran}".strip()


class _Dumper(yaml.SafeDumper):
    """Writes texts in quotes where a plain one would be read as something else."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the name is PyYAML's
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    node = dumper.represent_str(text)
    try:
        is_clear = scalar_value(node) == text
    except ValueError:
        is_clear = False
    is_clear = is_clear and not ESCAPED_IN_YAML.search(text)
    return node if is_clear else yaml.ScalarNode(node.tag, text, style='"')


_Dumper.add_representer(str, _represent_text)


def render(dag: Dag) -> str:
    """The YAML of a DAG, without what has its default."""
    return written(plain(dag))


def written(said: Plain) -> str:
    """A part of a canonical form, as YAML."""
    return yaml.dump(said, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)

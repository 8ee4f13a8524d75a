"""The shape of what the connector builds on, per release of vLLM, read from its sources.

    python tests/releases/signatures.py

writes ``signatures/<release>.json`` for every release of ``pins.json``. Nothing is imported: the
sources are parsed, so any Python and any release will do.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import sources
from watched import CALLS, CLASSES, Watched

FOLDER = Path(__file__).with_name("signatures")

Shape = dict[str, str]  # member -> its kind and signature
Snapshot = dict[str, Shape]  # what is watched -> its members


def snapshot(package: Path) -> Snapshot:
    """The shape of everything that is watched, in the ``vllm/`` folder `package`."""
    found = {name: shape(package, watched) for name, watched in CLASSES.items()}
    for name, (files, receiver, methods) in CALLS.items():
        found[name] = calls(package, files, receiver, methods)
    return found


def shape(package: Path, watched: Watched) -> Shape:
    """The members of one class that count, with those that it inherits; empty if there is none."""
    known = _classes(package, watched.files)
    name = next((name for name in watched.classes if name in known), None)
    members = _members(name, known) if name else {}
    return {
        member: text
        for member, text in sorted(members.items())
        if member in watched.names or (watched.public and not member.startswith("_"))
    }


def calls(package: Path, files: str, receiver: str, methods: tuple[str, ...]) -> Shape:
    """How the methods of ``receiver`` or ``….receiver`` are called: ``(_, _, notif_msg=)``."""
    found: dict[str, set[str]] = {}
    for tree in _trees(package, files):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            method, on = node.func.attr, node.func.value
            called = on.attr if isinstance(on, ast.Attribute) else getattr(on, "id", "")
            if called == receiver and (not methods or method in methods):
                passed = ["_" for _ in node.args] + [f"{k.arg}=" for k in node.keywords]
                found.setdefault(method, set()).add(f"({', '.join(passed)})")
    return {method: " or ".join(sorted(shapes)) for method, shapes in sorted(found.items())}


def drift(old: Snapshot, new: Snapshot) -> list[str]:
    """What was added, removed or changed, one line each: ``added Class.member: signature``."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, {}), new.get(name, {})
        for member in sorted(before.keys() | after.keys()):
            label = f"{name}.{member}"
            if member not in before:
                lines.append(f"added {label}: {after[member]}")
            elif member not in after:
                lines.append(f"removed {label}: {before[member]}")
            elif before[member] != after[member]:
                lines.append(f"changed {label}: {before[member]} -> {after[member]}")
    return lines


def committed(version: str) -> Snapshot:
    """The snapshot of a release as it lies in the repository."""
    loaded: Snapshot = json.loads((FOLDER / f"{version}.json").read_text())
    return loaded


def written(found: Snapshot) -> str:
    """The text of a snapshot's file."""
    return json.dumps(found, indent=1) + "\n"


@functools.cache
def _trees(package: Path, files: str) -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted(package.glob(files))]


def _classes(package: Path, files: str) -> dict[str, ast.ClassDef]:
    return {
        node.name: node
        for tree in _trees(package, files)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _members(name: str, known: dict[str, ast.ClassDef]) -> Shape:
    """Of a class and of those it extends, as far as `known` has them; its own ones win."""
    members: Shape = {}
    for base in known[name].bases:
        # A base of the same name comes from another module (class X(upstream.X)).
        if isinstance(base, ast.Name) and base.id in known and base.id != name:
            members |= _members(base.id, known)
    own = dict(_own(known[name]))
    # What a method assigns does not hide the annotation in a class body.
    assigned = dict.fromkeys(_assigned(known[name]), "attr")
    return members | {a: text for a, text in assigned.items() if a not in members} | own


def _own(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            yield item.name, _function(item)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            default = f" = {ast.unparse(item.value)}" if item.value else ""
            yield item.target.id, f"attr: {_annotation(item.annotation)}{default}"
        elif isinstance(item, ast.Assign):
            for target in item.targets:
                yield ast.unparse(target), f"attr = {ast.unparse(item.value)}"


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    for item in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(item, ast.Assign):
            targets = item.targets
        elif isinstance(item, ast.AnnAssign):
            targets = [item.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                yield target.attr


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    kinds = ("property", "classmethod", "staticmethod")
    kind = next((kind for kind in kinds if kind in decorators), "method")
    if "abstractmethod" in decorators:
        kind = f"abstract {kind}"
    arguments = _parameters(node.args, bound="staticmethod" not in decorators)
    returns = f" -> {_annotation(node.returns)}" if node.returns else ""
    return f"{kind} ({arguments}){returns}"


def _parameters(arguments: ast.arguments, *, bound: bool) -> str:
    """Names and defaults, without annotations and without ``self`` or ``cls``."""
    bare = ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in arguments.posonlyargs],
        args=[ast.arg(a.arg) for a in arguments.args][1 if bound else 0 :],
        vararg=arguments.vararg and ast.arg(arguments.vararg.arg),
        kwonlyargs=[ast.arg(a.arg) for a in arguments.kwonlyargs],
        kw_defaults=arguments.kw_defaults,
        kwarg=arguments.kwarg and ast.arg(arguments.kwarg.arg),
        defaults=arguments.defaults,
    )
    return ast.unparse(bare)


def _annotation(node: ast.expr) -> str:
    """``"A" | None`` and ``A | None`` are the same."""
    return ast.unparse(node).replace("'", "").replace('"', "")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for version in sources.RELEASES:
        text = written(snapshot(sources.release(version) / "vllm"))
        (FOLDER / f"{version}.json").write_text(text)
        print(version)

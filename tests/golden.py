"""Golden bytes of every wire message, and docs/messages.md. Run `python -m tests.golden` to write.

Examples are built from the types alone, so that they are the same on every machine: `least` has
the required fields only, `full` has them all. Regenerate after a change of wire.py and read the
difference: old bytes of `least` that no longer decode break a running deployment.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect as mi

from talaria_common import subjects, wire
from talaria_common.wire import Message

ROOT: Final = Path(__file__).parent.parent
GOLDEN: Final = ROOT / "tests/data/wire.json"
DOCS: Final = ROOT / "docs/messages.md"


def messages() -> list[type[Message]]:
    """All messages, in the order of wire.py."""
    return [kind for kind in vars(wire).values() if _is_message(kind)]


def example(kind: type[Message], *, is_full: bool) -> Message:
    """A deterministic instance."""
    info = mi.type_info(kind)
    assert isinstance(info, mi.StructType)
    value: Message = msgspec.convert(_struct(info, is_full), kind)
    return value


def golden() -> dict[str, dict[str, str]]:
    """Bytes of both examples of each message, in hex."""
    return {
        kind.__name__: {
            "least": wire.encode(example(kind, is_full=False)).hex(),
            "full": wire.encode(example(kind, is_full=True)).hex(),
        }
        for kind in messages()
    }


def recorded() -> dict[str, dict[str, str]]:
    """What tests/data/wire.json holds."""
    held: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())
    return held


def _is_message(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Message) and kind is not Message


def _struct(info: mi.StructType, is_full: bool) -> Any:
    values = {
        field.encode_name: _value(field.type, field.name, is_full)
        for field in info.fields
        if is_full or field.required
    }
    if info.array_like:
        every = [_value(field.type, field.name, is_full) for field in info.fields]
        return every[: len(every) if is_full else len(values)]
    return values | ({info.tag_field: info.tag} if info.tag_field else {})


def _value(kind: mi.Type, name: str, is_full: bool) -> Any:
    match kind:
        case mi.Metadata(type=inner):
            return _value(inner, name, is_full)
        case mi.UnionType(types=types):
            return _value(next(t for t in types if not isinstance(t, mi.NoneType)), name, is_full)
        case mi.StructType():
            return _struct(kind, is_full)
        case mi.LiteralType(values=values):
            return values[0]
        case mi.EnumType(cls=cls):
            return next(iter(cls)).value
        case mi.StrType():
            return f"{name}-é"
        case mi.BytesType():
            return name.encode()
        case mi.BoolType():
            return True
        case mi.IntType():
            return 1000 + len(name)
        case mi.FloatType():
            return len(name) / 8
        case mi.VarTupleType(item_type=item) | mi.ListType(item_type=item):
            return [_value(item, name, is_full)] if is_full else []
        case mi.TupleType(item_types=items):
            return [_value(item, name, is_full) for item in items]
        case mi.DictType(key_type=key, value_type=value):
            return {_value(key, name, is_full): _value(value, name, is_full)} if is_full else {}
        case _:
            raise TypeError(f"{name}: no example for {kind}")


# --- docs/messages.md ---------------------------------------------------------------------------

_SECTION = re.compile(r"^# --- (.+?) -+$")


def docs() -> str:
    """The text of docs/messages.md, made from wire.py and subjects.py."""
    source = Path(wire.__file__).read_text()
    tree = ast.parse(source)
    sections = {
        number: match[1]
        for number, line in enumerate(source.splitlines(), 1)
        if (match := _SECTION.match(line))
    }
    out = [
        "# Messages",
        "Generated from `libs/common/talaria_common/wire.py` and `subjects.py` by "
        "`python -m tests.golden`; a test keeps it current.",
        (ast.get_docstring(tree) or "").partition("\n\n")[2],
        "Times are seconds as floats. A field without a default is required. A message with a "
        "value outside the bounds of its type is dropped whole.",
        "## Subjects",
        *_subjects(),
        "## Types",
    ]
    for node in tree.body:
        for number in [n for n in sections if n < node.lineno]:
            title = sections.pop(number)
            if title != "codecs":
                out.append(f"## {title[0].upper()}{title[1:]}")
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_") and name != "Message":
                out.extend(_class(node))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                assert node.value is not None
                out.append(f"`{name}` = `{ast.unparse(node.value)}`")
    return "\n\n".join(out) + "\n"


def _class(node: ast.ClassDef) -> Iterator[str]:
    kind = getattr(wire, node.name)
    tag = f" (`{kind.__struct_config__.tag}`)" if _is_message(kind) else ""
    yield f"### {node.name}{tag}"
    if text := ast.get_docstring(node):
        yield " ".join(text.split())
    is_struct = issubclass(kind, msgspec.Struct)
    rows = ["| field | type | default | |", "|---|---|---|---|"] if is_struct else []
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        note = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            note = " ".join(str(after.value.value).split())
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                default = f"`{ast.unparse(value)}`" if value is not None else ""
                shown = ast.unparse(annotation).replace("|", "\\|")
                rows.append(f"| `{name}` | `{shown}` | {default} | {note} |")
            case ast.Assign(targets=[ast.Name()], value=ast.Constant(value=str(value))):
                rows.append(f"- `{value}`" + (f": {note}" if note else ""))
    yield "\n".join(rows)


def _subjects() -> Iterator[str]:
    rows = ["| | subject | |", "|---|---|---|"]
    for node in ast.parse(Path(subjects.__file__).read_text()).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) if name.isupper() and name != "ROOT":
                value = getattr(subjects, name)
                if isinstance(value, str) and not name.startswith("_"):
                    rows.append(f"| `{name}` | `{value}` | |")
            case ast.FunctionDef(name=name, args=arguments) if name != "slug":
                made = getattr(subjects, name)(*["ID"] * len(arguments.args))
                note = " ".join((ast.get_docstring(node) or "").split())
                rows.append(f"| `{name}(...)` | `{made}` | {note} |")
    yield "\n".join(rows)


def main() -> None:
    """Write both files."""
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden(), indent=1) + "\n")
    DOCS.write_text(docs())
    print(f"wrote {GOLDEN.relative_to(ROOT)} and {DOCS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

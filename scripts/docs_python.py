"""Hook of MkDocs: replaces `[millrace.module.Name]` on the reference page by the docstrings of the sources."""

import ast
import re
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "python"
PAGE = "reference/python.md"


def on_page_markdown(markdown, page, **options):
    if page.file.src_uri != PAGE:
        return markdown
    return re.sub(r"^\[(millrace[\w.]+)\]$", lambda found: reference(found[1]), markdown, flags=re.MULTILINE)


def reference(name):
    path = SOURCES / Path(*name.split("."))
    if path.with_suffix(".py").exists():
        tree = ast.parse(path.with_suffix(".py").read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        lines = [f"| `millrace.{node.name}` | {' '.join(text(node).split())} |" for node in classes]
        return "\n".join([f"## `{name}`", "", text(tree), "", "| exception | meaning |", "|---|---|", *lines])
    tree = ast.parse(path.parent.with_suffix(".py").read_text())
    kinds = ast.ClassDef | ast.FunctionDef
    (node,) = [node for node in tree.body if isinstance(node, kinds) and node.name == path.name]
    if isinstance(node, ast.FunctionDef):
        return "\n\n".join([f"## `{name}`", code(node, path.name), text(node)])
    made = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    parts = [f"## `{name}`", *(code(item, path.name) for item in made if item.name == "__init__"), text(node)]
    for item in made:
        if not item.name.startswith("_") and ast.get_docstring(item):
            is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in item.decorator_list)
            parts += [f"### `{path.name}.{item.name}`", "" if is_property else code(item, item.name), text(item)]
    return "\n\n".join(part for part in parts if part)


def code(item, name):
    item.args.args = [argument for argument in item.args.args if argument.arg != "self"]
    return f"```python\n{name}({ast.unparse(item.args)})\n```"


def text(node):
    """A docstring as Markdown: fields become a list, roles and double quotes become code."""
    lines = []
    for line in (ast.get_docstring(node) or "").split("\n"):
        field = re.match(r":(param|raises) ([\w.]+): ?(.*)", line)
        raises = "raises " if field and field[1] == "raises" else ""
        lines.append(f"- {raises}`{field[2]}`: {field[3]}" if field else line)
    found = re.sub(r":(?:class|meth|mod):`([^`]+)`", r"`\1`", "\n".join(lines))
    return found.replace("``", "`")

"""Every fenced code block of the README and of docs/ is run, or says why not.

| block | what happens |
|---|---|
| python | run, top to bottom, in one namespace for each page |
| toml | read as TOML; as a configuration of Treadle when it is a `code-block` or begins with `# treadle.toml` |
| json | parsed |
| console, bash | lines `$ treadle ...` and `$ pytest ...` (in bash without the `$`) are run, with variables in front or not |
| text | nothing: it is output or a picture |

A page's blocks share one empty folder. A block that begins with a comment such as `# my_plugin.py` is also saved there
under that name. `<!-- not run: why -->` in front of a block excuses it; `<!-- needs: model -->` near the top of a page
marks its test with `model`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.mark import ParameterSet

from treadle.errors import ConfigError
from treadle.settings import load

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}|:{3,}) *(?P<info>[^`]*)$")
REASON = re.compile(r"<!-- *not run: *(\S.*?) *-->")
SAVED_AS = re.compile(r"# *([\w./-]+\.(?:toml|py|json|jsonl))$")
CODE_DIRECTIVES = ("{code-block}", "{code}", "{sourcecode}")
PROGRAMS = {"treadle": "treadle.cli:main", "pytest": "pytest:main"}
"""Commands that are run, each by the function behind its script."""
VARIABLES = re.compile(r"(?:[A-Z_]+=(?:'[^']*'|[^\s']*) +)*")
LONGEST_S = 300


@dataclass(frozen=True)
class Block:
    """A fenced code block; `text` has no fences and no directive options."""

    page: str
    line: int
    """Line of the page on which `text` begins, counted from 1."""
    language: str
    text: str
    is_directive: bool = False
    reason: str | None = None
    """Why it is not run."""

    @property
    def saved_as(self) -> str | None:
        found = SAVED_AS.match(self.text.split("\n", 1)[0])
        return found[1] if found else None


class BlockError(AssertionError):
    """A block that fails, or that is neither run nor excused."""

    def __init__(self, block: Block, problem: str) -> None:
        super().__init__(f"{block.page}:{block.line}: {problem}")


def blocks_of(markdown: str, page: str) -> list[Block]:
    """The code blocks of a page. Other MyST directives are looked into when fenced by colons, else left to Sphinx."""
    found = []
    lines = iter(enumerate(markdown.splitlines(), start=1))
    before = ""
    for number, line in lines:
        opening = FENCE.match(line)
        if opening is None:
            before = line if line.strip() else before
            continue
        language, is_directive = language_of(opening["info"])
        if opening["fence"].startswith(":") and not is_directive:
            continue
        body = body_of(lines, opening["fence"], len(opening["indent"]))
        start, body = without_options(number + 1, body) if is_directive else (number + 1, body)
        if not language.startswith("{"):
            reason = REASON.search(before)
            text = "".join(f"{text}\n" for text in body)
            found.append(Block(page, start, language, text, is_directive, reason[1] if reason else None))
        before = ""
    return found


def language_of(info: str) -> tuple[str, bool]:
    """The language that a fence names, and whether by a directive."""
    words = info.split()
    if words and words[0] in CODE_DIRECTIVES:
        return (words[1] if len(words) > 1 else "", True)
    return (words[0] if words else "", False)


def body_of(lines: Iterator[tuple[int, str]], fence: str, indent: int) -> list[str]:
    body: list[str] = []
    for _, line in lines:
        closing = line.strip()
        if len(closing) >= len(fence) and set(closing) == {fence[0]}:
            return body
        body.append(line[min(indent, len(line) - len(line.lstrip())) :])
    raise AssertionError(f"a code block is not closed: {fence} {body[:1]}")


def without_options(number: int, body: list[str]) -> tuple[int, list[str]]:
    """Drop `:name: value` lines and the blank line behind them."""
    skipped = 0
    while skipped < len(body) and re.match(r":[\w-]+:", body[skipped]):
        skipped += 1
    if skipped and skipped < len(body) and not body[skipped].strip():
        skipped += 1
    return number + skipped, body[skipped:]


def commands_of(block: Block) -> list[str]:
    """The commands of a console or bash block. Raises BlockError for one that is not run."""
    text = re.sub(r"\\\n(> ?)?", "", block.text)
    commands = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(line[2:].strip())
        elif block.language != "console" and line.strip() and not line.startswith("#"):
            commands.append(line.strip())
    for command in commands:
        if VARIABLES.sub("", command, count=1).split()[0] not in PROGRAMS:
            known = " and ".join(PROGRAMS)
            raise BlockError(block, f"{command!r} is not run; only {known} are. Excuse it with <!-- not run: why -->")
    if not commands:
        raise BlockError(block, "there is no line '$ treadle ...' to run; output alone is a `text` block")
    return commands


class Runner:
    """Runs one page's blocks in `folder`, which is the current one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # a real module, so that dataclasses and settings models of the page can look up their annotations
        self._module = ModuleType(f"page_{folder.name}")
        self._module.__dict__["__name__"] = self._module.__name__

    def run(self, blocks: Iterable[Block]) -> None:
        sys.modules[self._module.__name__] = self._module
        try:
            for block in blocks:
                if block.reason is None:
                    self._run(block)
        finally:
            del sys.modules[self._module.__name__]

    def _run(self, block: Block) -> None:
        if block.saved_as:
            path = self._folder / block.saved_as
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        if block.language == "python":
            self._run_python(block)
        elif block.language == "toml":
            self._check_toml(block)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language in ("console", "bash"):
            self._run_commands(block)
        elif block.language != "text":
            name = f"language {block.language!r}" if block.language else "no language"
            raise BlockError(block, f"a block of {name} is not run; name one that is, `text`, or <!-- not run: why -->")

    def _run_python(self, block: Block) -> None:
        # blank lines in front, so that a traceback shows the page's own lines
        code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
        try:
            exec(code, self._module.__dict__)  # noqa: S102  # our own documentation
        except Exception as error:
            raise BlockError(block, f"{type(error).__name__}: {error}") from error

    def _check_toml(self, block: Block) -> None:
        tomllib.loads(block.text)
        is_config = block.saved_as == "treadle.toml" or (block.is_directive and block.saved_as is None)
        if is_config:
            path = self._folder / (block.saved_as or f"line{block.line}.toml")
            path.write_text(block.text, encoding="utf-8")
            check_config(path)

    def _run_commands(self, block: Block) -> None:
        for command in commands_of(block):
            done = subprocess.run(  # noqa: S603  # our own documentation
                ["/bin/sh", "-c", command],
                cwd=self._folder,
                env={**os.environ, "PATH": f"{self._shims()}{os.pathsep}{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LONGEST_S,
                check=False,
            )
            if done.returncode:
                raise BlockError(block, f"{command!r} ended with {done.returncode}:\n{done.stdout}{done.stderr}")

    def _shims(self) -> Path:
        """A folder with programs that run under this interpreter, whatever is installed elsewhere."""
        folder = self._folder / ".bin"
        if not folder.exists():
            folder.mkdir()
            for name, target in PROGRAMS.items():
                module, _, function = target.partition(":")
                # as for an installed script, the current folder is not on the path
                run = f"import sys; sys.path.remove(''); from {module} import {function}; sys.exit({function}())"
                (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(run)} "$@"\n')
                (folder / name).chmod(0o755)
        return folder


def check_config(path: Path) -> None:
    """Raise ConfigError unless the file is a configuration that would be accepted as it stands."""
    load(path, environment=False)


def pages() -> list[Path]:
    docs = (page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
    return [ROOT / "README.md", *sorted(docs)]


def parameters() -> list[ParameterSet]:
    found: list[ParameterSet] = []
    for page in pages():
        name = page.relative_to(ROOT).as_posix()
        head = page.read_text(encoding="utf-8").splitlines()[:15] if page.exists() else []
        # such a page loads the model once for each of its commands
        marks = [pytest.mark.model, pytest.mark.timeout(600)] if "<!-- needs: model -->" in head else []
        found.append(pytest.param(page, id=name, marks=marks))
    return found


@pytest.mark.parametrize("page", parameters())
def test_code_blocks_of(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    Runner(tmp_path).run(blocks_of(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()))
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]  # a file that the page saved and imported


# --- the helpers themselves ----------------------------------------------------------------------------------------


def run(markdown: str, folder: Path) -> None:
    Runner(folder).run(blocks_of(markdown, "page.md"))


def test_blocks_are_found_with_their_lines_languages_and_reasons() -> None:
    page = """# Title

```python
a = 1
```

<!-- not run: takes an hour -->

```console
$ treadle bench
```

````{code-block} toml
:caption: treadle.toml

model = "x"
````

- in a list:
  ~~~python
  if a:
      b = 2
  ~~~

:::{note}
```text
picture
```
:::

```{eval-rst}
.. automodule:: treadle
```
"""
    found = blocks_of(page, "page.md")
    assert [(b.line, b.language, b.text, b.is_directive, b.reason) for b in found] == [
        (4, "python", "a = 1\n", False, None),
        (10, "console", "$ treadle bench\n", False, "takes an hour"),
        (16, "toml", 'model = "x"\n', True, None),
        (21, "python", "if a:\n    b = 2\n", False, None),
        (27, "text", "picture\n", False, None),
    ]


def test_a_reason_excuses_the_next_block_only() -> None:
    block = "```python\n1\n```\n"
    page = f"<!-- not run: a -->\n{block}{block}<!-- not run: b -->\nWords.\n{block}"
    assert [block.reason for block in blocks_of(page, "page.md")] == ["a", None, None]


def test_python_blocks_share_a_namespace_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    saved, used = "# saved_by_page.py\nx = 1", "import saved_by_page\nassert saved_by_page.x == x"
    run(f"```python\n{saved}\n```\n\n```python\n{used}\n```\n", tmp_path)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("```python\n\n1 / 0\n```\n", r"page\.md:2: ZeroDivisionError"),
        ("```python\nassert 1 == 2\n```\n", r"page\.md:2: AssertionError"),
        ("```\nwords\n```\n", "no language"),
        ("```yaml\na: 1\n```\n", "language 'yaml'"),
        ("```console\n$ pip install treadle\n```\n", "'pip install treadle' is not run"),
        ("```bash\nmake all\n```\n", "'make all' is not run"),
        ("```console\noutput only\n```\n", "no line"),
        ("```console\n$ treadle no-such-command\n```\n", "'treadle no-such-command' ended with"),
    ],
)
def test_a_block_that_fails_or_is_not_run_fails(block: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(BlockError, match=problem):
        run(block, tmp_path)


def test_a_block_with_a_reason_is_left_alone(tmp_path: Path) -> None:
    run("<!-- not run: an example of what fails -->\n\n```python\n1 / 0\n```\n", tmp_path)


def test_a_traceback_shows_the_line_of_the_page(tmp_path: Path) -> None:
    with pytest.raises(BlockError) as caught:
        run("# Title\n\n```python\na = 1\n1 / 0\n```\n", tmp_path)
    cause = caught.value.__cause__
    assert cause is not None
    assert cause.__traceback__ is not None
    frame = cause.__traceback__.tb_next
    assert frame is not None
    assert frame.tb_lineno == 5


def test_toml_that_is_no_toml_fails(tmp_path: Path) -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        run("```toml\na = \n```\n", tmp_path)


@pytest.mark.parametrize("opening", ["```{code-block} toml\n", "```toml\n# treadle.toml\n"])
def test_a_marked_configuration_is_validated(opening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setitem(globals(), "check_config", lambda path: seen.append(path.read_text()))
    run(f'{opening}model = "x"\n```\n\n```toml\n# pyproject.toml\n[project]\n```\n\n```toml\nother = 1\n```\n', tmp_path)
    assert len(seen) == 1
    assert 'model = "x"' in seen[0]


def test_a_wrong_configuration_fails(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="admitt"):
        run('```toml\n# treadle.toml\n[admitt]\nstrategy = "windowed"\n```\n', tmp_path)


def test_commands_may_continue_and_have_output() -> None:
    block = Block("page.md", 1, "console", "$ treadle generate \\\n>   --max-tokens 3 'a'\nParis\n$ treadle explain\n")
    assert commands_of(block) == ["treadle generate   --max-tokens 3 'a'", "treadle explain"]


def test_commands_may_have_variables_in_front() -> None:
    text = "$ A=1 TREADLE_PLUGINS='[\"a b\"]' treadle explain\n$ PYTHONPATH=. treadle explain\n"
    assert len(commands_of(Block("page.md", 1, "console", text))) == 2
    with pytest.raises(BlockError, match="pip"):
        commands_of(Block("page.md", 1, "console", "$ A=1 pip install treadle\n"))


def test_the_page_list_holds_the_readme_and_the_documentation() -> None:
    names = [page.relative_to(ROOT).as_posix() for page in pages()]
    assert names[0] == "README.md"
    assert "docs/explanation/architecture.md" in names

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("check_docs", ROOT / "scripts" / "check_docs.py")
check_docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_docs)

GOOD = """\
# First part: `code` & more
See [here](sub/other.md), [there](sub/other.md#the-second-heading "title"), [above](#first-part-code--more),
![picture](sub/pic.png), [the net](https://example.org/x), [mail](mailto:a@b.c),
[with space](sub/a%20b.md) and `[not a link](nowhere)`. By name: [text][ref].

[ref]: sub/other.md

```python
x = handlers[0](nowhere)
```

```
[not checked](nowhere)
```
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.md").write_text("# one\n## The second heading\n[back](../README.md)\n")
    (tmp_path / "sub" / "a b.md").write_text("")
    (tmp_path / "sub" / "pic.png").touch()
    (tmp_path / "README.md").write_text(GOOD)
    return tmp_path


def test_good_files_pass(folder, capsys):
    assert check_docs.main([str(folder)]) == 0
    assert capsys.readouterr().out == "3 Markdown files, 0 problems\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a [link](missing.md)", r"README.md:2: link (missing.md) leads to nothing"),
        ("[a [b] c](missing.md)", "leads to nothing"),
        ("![x](sub/no.png)", "leads to nothing"),
        ("[x]: missing.md", "leads to nothing"),
        ("[x](sub/other.md#third)", "names a heading that other.md does not have"),
        ("[x](#nowhere)", "names a heading that README.md does not have"),
        ("[x](/sub/other.md)", "is absolute"),
        ("[x](../)", "leaves the repository"),
        ("[fine](sub/other.md) [bad](gone.md)", "(gone.md)"),
    ],
)
def test_each_kind_of_broken_link_is_named_with_its_place(folder, line, message, capsys):
    (folder / "README.md").write_text(f"# title\n{line}\n")
    assert check_docs.main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert message in out
    assert "3 Markdown files, 1 problems" in out


def test_python_that_does_not_compile_is_named_with_its_line(folder, capsys):
    (folder / "README.md").write_text("text\n\n   ```python\n   x = 1\n   y = = 2\n   ```\n")
    assert check_docs.main([str(folder)]) == 1
    assert "README.md:5: Python block does not compile" in capsys.readouterr().out


def test_a_folder_without_files_is_refused(tmp_path):
    assert check_docs.main([str(tmp_path)]) == 2


def test_what_git_ignores_is_not_read(folder):
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".gitignore").write_text("/runs/\n")
    (folder / "runs").mkdir()
    (folder / "runs" / "x.md").write_text("[x](missing.md)")
    assert check_docs.main([str(folder)]) == 0

"""Check the Markdown files: relative links lead somewhere, Python blocks compile.

    python scripts/check_docs.py [FOLDER]

Prints one line per problem and exits 1 if there is any. Links with a scheme (https:) are not followed.
"""

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

# [text](target), [text](<target> "title") and images; the text may hold one level of brackets.
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]*)>?(?:\s+[\"'(][^)]*)?\)")
# [text]: target
_LINK_DEFINITION = re.compile(r"^ {0,3}\[[^\]^]+\]:\s*<?(\S+?)>?(?:\s|$)")
_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w+-]*)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$")
_INLINE_CODE = re.compile(r"(`+)(?:(?!\1).)*\1")


def markdown_files(root: Path) -> list[Path]:
    """The Markdown files that git knows or would add; all of them where there is no git."""
    command = [
        "git",
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        "*.md",
    ]
    try:
        names = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        hidden_or_deep = (path.relative_to(root) for path in root.rglob("*.md"))
        names = [str(path) for path in hidden_or_deep if not any(part.startswith(".") for part in path.parts)]
    # A file that was deleted but not committed so is still listed.
    return sorted(root / name for name in set(names) if name and (root / name).is_file())


def blocks(text: str) -> Iterator[tuple[int, str | None, str]]:
    """(first line's number, language, text): language is None for prose and '' for a block without one."""
    prose: list[str] = []
    code: list[str] = []
    prose_start, code_start, language, fence = 1, 0, "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[2].startswith(fence) and not line.strip().strip(fence[0]):
                yield code_start, language, textwrap.dedent("\n".join(code))
                fence, prose, prose_start = "", [], number + 1
            else:
                code.append(line)
        elif mark:
            yield prose_start, None, "\n".join(prose)
            fence, language, code, code_start = mark[2], mark[3].lower(), [], number + 1
        else:
            prose.append(line)
    yield (code_start, language, "\n".join(code)) if fence else (prose_start, None, "\n".join(prose))


def anchors(text: str) -> set[str]:
    """The names that headings get on GitHub, and explicit ones."""
    found: set[str] = set()
    for _, language, prose in blocks(text):
        if language is not None:
            continue
        found.update(re.findall(r"<a\s+(?:id|name)=[\"']([^\"']+)", prose))
        for line in prose.splitlines():
            if heading := _HEADING.match(line):
                title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "").lower()
                slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
                repeats = (f"{slug}-{i}" for i in range(1, 100))
                found.add(slug if slug not in found else next(name for name in repeats if name not in found))
    return found


def _link_problem(target: str, file: Path, root: Path) -> str | None:
    """What is wrong with a link's target, seen from `file`; None if nothing."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", target) or target.startswith("//"):
        return None
    name, _, anchor = unquote(target).partition("#")
    path = (file.parent / name).resolve() if name else file
    if name.startswith("/"):
        return f"link ({target}) is absolute; write it relative to this file"
    if not path.exists():
        return f"link ({target}) leads to nothing; correct it or add {name}"
    if not path.is_relative_to(root.resolve()):
        return f"link ({target}) leaves the repository; readers elsewhere do not have what is there"
    if anchor and path.suffix == ".md" and anchor.lower() not in anchors(path.read_text(encoding="utf-8")):
        return f"link ({target}) names a heading that {path.name} does not have"
    return None


def problems_in(file: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, problem) for each broken link and each Python block that does not compile."""
    for start, language, text in blocks(file.read_text(encoding="utf-8")):
        if language in ("python", "py", "python3"):
            try:
                compile(text, str(file), "exec")
            except SyntaxError as error:
                yield start + (error.lineno or 1) - 1, f"Python block does not compile: {error.msg}"
        if language is not None:
            continue
        for number, line in enumerate(text.splitlines(), start=start):
            line = _INLINE_CODE.sub("", line)
            for target in [*_LINK.findall(line), *_LINK_DEFINITION.findall(line)]:
                if problem := _link_problem(target, file, root):
                    yield number, problem


def main(arguments: list[str]) -> int:
    """Print the problems below the folder given (default: the repository); the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    files = markdown_files(root)
    if not files:
        print(f"{root}: no Markdown files; name another folder", file=sys.stderr)
        return 2
    count = 0
    for file in files:
        for line, problem in problems_in(file, root):
            print(f"{file.relative_to(root)}:{line}: {problem}")
            count += 1
    print(f"{len(files)} Markdown files, {count} problems")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

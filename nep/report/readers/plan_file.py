"""Plan files: the canonical JSON of a plan, as `nep plan --out` writes it."""

from pathlib import Path

from nep.planning.plan import Plan
from nep.report.readers.files import read_text


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        ValueError: it cannot be read, or is no plan of a format that this version reads.
    """
    text = read_text(path, "a plan that `nep plan --out` wrote")
    try:
        return Plan.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

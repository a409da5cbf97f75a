"""What pyproject.toml lists by hand must be what there is."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_in_the_wheel():
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "nep").rglob("__init__.py")}
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == found | {"nep_models"}


def test_every_folder_of_modules_is_a_package():
    assert {path.parent for path in (ROOT / "nep").rglob("*.py")} == {
        path.parent for path in (ROOT / "nep").rglob("__init__.py")
    }


def test_models_modules_do_not_import_each_other_by_the_repository_name():
    # Installed they are called nep_models, where `import models` would find nothing, or something else.
    for path in (ROOT / "models").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) models\b", path.read_text(), re.MULTILINE), path


def test_constraints_pin_everything_that_is_depended_on_directly():
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    project = PROJECT["project"]
    direct = project["dependencies"] + [
        requirement for extra in project["optional-dependencies"].values() for requirement in extra
    ]
    names = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in direct} - {"nep"}
    assert names <= pinned

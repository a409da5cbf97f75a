"""Hardware profiles: published ones by name, measured ones from a file."""

import re
from pathlib import Path

from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.profiles import PROFILES
from nep.report.readers.files import read_text


def read_hardware(source: str) -> HardwareProfile:
    """A published profile, or one that `nep calibrate` wrote.

    Args:
        source: a name or the beginning of one, in any case (`H100`), or a path.

    Raises:
        ValueError: there is none, or the beginning fits several.
    """
    wanted = re.sub(r"[^a-z0-9]", "", source.lower())
    fitting = [name for name in PROFILES if wanted and re.sub(r"[^a-z0-9]", "", name).startswith(wanted)]
    if len(fitting) == 1:
        return PROFILES[fitting[0]]
    path = Path(source)
    if path.exists() or path.suffix == ".json":
        return HardwareProfile.from_json(read_text(path, "a hardware profile that `nep calibrate` wrote"))
    raise ValueError(
        f"hardware ({source}) {'may be any of ' + ', '.join(fitting) if fitting else 'is not known'}; choose one of "
        f"{', '.join(PROFILES)} or give a file that `nep calibrate` wrote"
    )

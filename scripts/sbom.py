"""The bill of materials of an environment: CycloneDX 1.6 as JSON, and a list of licences to read.

Python packages come from their own metadata, the base image's from dpkg's list. The same contents give the same bytes:
there is no time in it and the serial number is a hash.

    python3 scripts/sbom.py --venv /opt/venv --dpkg /var/lib/dpkg/status --out DIR     sbom.cdx.json, licences.txt
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import uuid
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any

NAME = "kserve-carousel"
UNKNOWN = "not stated"
DOCS = Path("/usr/share/doc")
_LONGEST = 100  # a License field that is longer holds the text and not the name
_OSI = "License :: OSI Approved :: "

Component = dict[str, Any]


def normalized(name: str) -> str:
    """A distribution's name as package indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(dist: metadata.Distribution) -> tuple[str, bool]:
    """The licence's name, and whether it is an SPDX expression."""
    fields = dist.metadata
    for expression in fields.get_all("License-Expression") or []:
        return str(expression).strip(), True
    named = str((fields.get_all("License") or [""])[0]).strip()
    if named and len(named) <= _LONGEST and "\n" not in named and named.upper() != "UNKNOWN":
        return named, False
    classifiers = fields.get_all("Classifier") or []
    found = [text.removeprefix(_OSI) for text in classifiers if text.startswith(_OSI)]
    return (" and ".join(found) or UNKNOWN), False


def required_by(dist: metadata.Distribution) -> list[str]:
    """Names that a distribution requires without an extra; what a marker excludes here is not told apart."""
    names = []
    for text in dist.requires or []:
        requirement, _, marker = text.partition(";")
        match = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
        if match and "extra" not in marker:
            names.append(normalized(match[0]))
    return names


def python_components(site: Path) -> tuple[list[Component], list[dict[str, Any]]]:
    """The distributions below ``site`` as components, and their dependencies."""
    dists = {normalized(dist.metadata["Name"]): dist for dist in metadata.distributions(path=[str(site)])}
    refs = {name: f"pkg:pypi/{name}@{dist.version}" for name, dist in dists.items()}
    components, edges = [], []
    for name, dist in sorted(dists.items()):
        licence, spdx = licence_of(dist)
        component: Component = {
            "type": "library",
            "bom-ref": refs[name],
            "name": name,
            "version": dist.version,
            "purl": refs[name],
        }
        if licence != UNKNOWN:
            component["licenses"] = [{"expression": licence} if spdx else {"license": {"name": licence}}]
        components.append(component)
        needed = sorted({refs[other] for other in required_by(dist) if other in refs})
        edges.append({"ref": refs[name], "dependsOn": needed})
    return components, edges


def system_licence(package: str) -> str:
    """The licences that a Debian package's copyright file names."""
    try:
        text = (DOCS / package / "copyright").read_text("utf-8", "replace")
    except OSError:
        return UNKNOWN
    found = sorted({match.strip() for match in re.findall(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE)})
    if not found:  # the old form, which refers to the texts that every Debian has
        found = sorted(set(re.findall(r"/usr/share/common-licenses/([A-Za-z0-9.+-]*[A-Za-z0-9])", text)))
    return "; ".join(found) or UNKNOWN


def system_components(status: Path) -> list[Component]:
    """The packages that dpkg's list ``status`` calls installed."""
    components = []
    for block in status.read_text("utf-8").strip().split("\n\n"):
        fields = HeaderParser().parsestr(block)
        if "installed" not in (fields["Status"] or "").split():
            continue
        name, version = fields["Package"], fields["Version"]
        purl = f"pkg:deb/debian/{name}@{version}?arch={fields['Architecture']}"
        component: Component = {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
        }
        licence = system_licence(name)
        if licence != UNKNOWN:
            component["licenses"] = [{"license": {"name": licence}}]
        components.append(component)
    return sorted(components, key=lambda item: str(item["bom-ref"]))


def document(components: list[Component], edges: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole bill; what it describes is Carousel itself.

    Raises:
        ValueError: when Carousel is not among the components.
    """
    own = [item for item in components if item["name"] == NAME]
    if len(own) != 1:
        raise ValueError(f"{NAME} is in the environment {len(own)} times")
    others = [item for item in components if item is not own[0]]
    digest = hashlib.sha256(json.dumps(components, sort_keys=True).encode()).digest()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}",
        "version": 1,
        "metadata": {"component": {**own[0], "type": "application"}},
        "components": others,
        "dependencies": edges,
    }


def shown_licence(component: Component) -> str:
    """A component's licence as text."""
    choices = component.get("licenses", [])
    if not choices:
        return UNKNOWN
    return str(choices[0].get("expression") or choices[0]["license"]["name"])


def listing(components: list[Component]) -> str:
    """One line a component: kind, name, version, licence."""
    lines = []
    for item in components:
        kind = "python" if item["purl"].startswith("pkg:pypi/") else "debian"
        lines.append(f"{kind:8}{item['name']:36} {item['version']:28} {shown_licence(item)}")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="the environment")
    parser.add_argument("--dpkg", type=Path, help="dpkg's list of the base image; left out where it is not there")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    options = parser.parse_args(argv)
    (site,) = options.venv.glob("lib/python3.*/site-packages")
    components, edges = python_components(site)
    if options.dpkg is not None and options.dpkg.exists():
        components += system_components(options.dpkg)
    options.out.mkdir(parents=True, exist_ok=True)
    bill = json.dumps(document(components, edges), indent=1, ensure_ascii=False) + "\n"
    (options.out / "sbom.cdx.json").write_text(bill, "utf-8")
    (options.out / "licences.txt").write_text(listing(components), "utf-8")
    without = sum(shown_licence(item) == UNKNOWN for item in components)
    print(f"sbom: {len(components)} components in {options.out}, {without} of them state no licence")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run the end-to-end tests against a Kubernetes, and leave nothing running.

With KUBECONFIG set: against that cluster, whose nodes must have the images CAROUSEL_E2E_IMAGE (carousel:demo) and, for
the load test, CAROUSEL_E2E_LOAD_IMAGE (without it that test is skipped). Else with
the project's cluster kit, which starts a real one on this machine and builds the image: found by CAROUSEL_CLUSTER_KIT,
or as ../shared/cluster beside this checkout or beside the one that it was cloned from. The kit needs root.

    python scripts/e2e.py            all of them, with KEDA, metrics-server and Prometheus
    python scripts/e2e.py --smoke    what CI runs: image, apply, calls, scale; without a kit nothing, and it says so
    python scripts/e2e.py --smoke --keep -- -k wrong_setting
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "carousel:demo"
LOAD_IMAGE = "carousel-loadtest:0.1.0"
SMOKE_SECONDS = 420.0
STATE = Path(os.environ.get("CLUSTER_HOME", "/tmp/carousel-cluster"))  # the kit's own default


class Failed(Exception):
    """A step failed; the message says which."""


class KitFailed(Failed):
    """The kit did not do its part, or not in time: nothing that is of this project is known to be wrong."""


def say(text: str) -> None:
    print(f"e2e: {text}", flush=True)


def kits() -> list[Path]:
    """Where the kit may be, the likeliest first."""
    named = os.environ.get("CAROUSEL_CLUSTER_KIT")
    if named:
        return [Path(named)]
    checkouts = [ROOT]
    for question in (
        ["config", "--get", "remote.origin.url"],
        ["rev-parse", "--path-format=absolute", "--git-common-dir"],
    ):
        done = subprocess.run(["git", "-C", str(ROOT), *question], capture_output=True, text=True, check=False)
        answer = done.stdout.strip().removeprefix("file://")
        if answer.startswith("/"):
            checkouts.append(Path(answer).parent if answer.endswith("/.git") else Path(answer))
    return [checkout.parent / "shared" / "cluster" for checkout in checkouts]


def find_kit() -> tuple[Path | None, str]:
    """The kit, or None and why not."""
    places = kits()
    for place in places:
        if (place / "up").exists():
            if os.geteuid() != 0:
                return None, f"the kit in {place} needs root"
            return place, ""
    looked = ", ".join(str(place) for place in dict.fromkeys(places))
    return None, f"no cluster kit in {looked} (CAROUSEL_CLUSTER_KIT names another place) and no KUBECONFIG"


class Steps:
    """Runs commands one after the other, with a deadline for all together."""

    def __init__(self, seconds: float | None, environment: dict[str, str]) -> None:
        self.started = time.monotonic()
        self.end = None if seconds is None else self.started + seconds
        self.environment = environment

    def run(self, what: str, *command: str | Path, check: bool = True, of_kit: bool = False) -> int:
        """The exit code.

        Raises:
            Failed: another one than 0 (with ``check``), or the time is up; what was started is ended then.
            KitFailed: the same of a step that is the kit's, and whenever the time is up before the tests.
        """
        say(f"{what} ({time.monotonic() - self.started:.0f} s)")
        left = None if self.end is None else max(1.0, self.end - time.monotonic())
        process = subprocess.Popen([*map(str, command)], cwd=ROOT, env=self.environment, start_new_session=True)
        try:
            code = process.wait(left)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                kind = KitFailed if check else Failed
                raise kind(f"{what}: not done within the {SMOKE_SECONDS:.0f} s for all steps") from None
            raise
        if code != 0 and check:
            raise (KitFailed if of_kit else Failed)(f"{what}: exit code {code}")
        return code


def answers(environment: dict[str, str]) -> bool:
    """Whether the kit's cluster runs already: then it is somebody's, and stays."""
    if not (STATE / "kubeconfig").exists() or shutil.which("kubectl", path=environment["PATH"]) is None:
        return False
    command = [str(STATE / "bin" / "kubectl"), "get", "--raw", "/readyz", "--request-timeout=5s"]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


def with_kit(kit: Path, options: argparse.Namespace) -> int:
    """Start the kit, test, and stop it, whatever happens in between."""
    environment = {
        **os.environ,
        "CLUSTER_HOME": str(STATE),
        "KUBECONFIG": str(STATE / "kubeconfig"),
        "PATH": f"{STATE / 'bin'}:{os.environ['PATH']}",
        "CAROUSEL_E2E_IMAGE": IMAGE,
        "CAROUSEL_E2E_LOAD_IMAGE": LOAD_IMAGE,
    }
    steps = Steps(SMOKE_SECONDS if options.smoke else None, environment)
    was_up = answers(environment)
    try:
        steps.run("start the cluster", kit / "up", of_kit=True)
        if not options.no_build:
            steps.run("build the image", kit / "build-image", ROOT, "--target", "demo", "-t", IMAGE)
            if not options.smoke:
                file = ROOT / "loadtest" / "Dockerfile"
                steps.run("build the load test's image", kit / "build-image", ROOT, "-f", file, "-t", LOAD_IMAGE)
        steps.run("KServe's kinds and controller", kit / "kserve" / "kserve-up", of_kit=True)
        if not options.smoke:
            for name in ("metrics-up", "keda-up", "prometheus-up"):
                steps.run(name, kit / "addons" / name, of_kit=True)
        return test(steps, options)
    finally:
        if was_up or options.keep:
            say("the cluster stays up" + (" as it was" if was_up else f": KUBECONFIG={environment['KUBECONFIG']}"))
        else:
            say("stop the cluster")
            subprocess.run([str(kit / "down")], env=environment, check=False)


def test(steps: Steps, options: argparse.Namespace) -> int:
    """Run pytest."""
    wanted = "smoke" if options.smoke else "e2e"
    command = [sys.executable, "-m", "pytest", "tests/cluster/e2e", "-m", wanted, "-s", "-q", *options.rest]
    return steps.run(f"tests: {wanted}", *command, check=False)


def ended(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that the cluster is stopped on the way out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="the short part")
    parser.add_argument("--keep", action="store_true", help="leave the kit's cluster running")
    parser.add_argument("--no-build", action="store_true", help="take the image that the kit has")
    parser.add_argument("rest", nargs="*", help="for pytest, after --")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, ended)
    try:
        if os.environ.get("KUBECONFIG"):
            return test(Steps(None, dict(os.environ)), options)
        kit, reason = find_kit()
        if kit is None:
            say(f"skipped: {reason}" if options.smoke else reason)
            return 0 if options.smoke else 2
        return with_kit(kit, options)
    except KitFailed as error:
        say(f"skipped, for the cluster kit is at fault or too slow: {error}" if options.smoke else str(error))
        return 0 if options.smoke else 1
    except Failed as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""``hf://org/repo[@revision][/file]``: a model of the Hugging Face Hub, through huggingface_hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from carousel.models.fetch.cache import Entry, FileRecord, Manifest, Wanted, check_sha256, log, sha256_of
from carousel.models.fetch.errors import SourceError
from carousel.models.fetch.progress import Progress

_URI = re.compile(r"hf://(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:[@:](?P<revision>[^/@:]+))?(?:/(?P<path>[^@]+))?")
_FORM = "Write hf://org/repo, hf://org/repo@revision or hf://org/repo@revision/file.gguf (a / in a revision is %2F)."
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt")


def check(wanted: Wanted) -> tuple[str, str, str]:
    """Split the URI into repository, revision ("main" if not given) and path ("" for the whole model)."""
    match = _URI.fullmatch(wanted.uri)
    if match is None:
        raise SourceError(wanted.uri, "it is not a repository of the Hub", _FORM)
    revision = (match["revision"] or "main").replace("%2F", "/").replace("%2f", "/")
    return match["repo"], revision, (match["path"] or "").strip("/")


def is_final(wanted: Wanted) -> bool:
    """Whether what is cached for this URI can never be outdated: its revision is a commit."""
    return _COMMIT.fullmatch(check(wanted)[1]) is not None


def fetch(wanted: Wanted, entry: Entry, known: Manifest | None) -> Manifest:
    """Download what the revision holds now; `known` is handed back if that is it, or if the Hub does not answer."""
    repo, revision, path = check(wanted)
    # The transfer cache of hf-xet would otherwise go to the home folder, which a pod may not have.
    os.environ.setdefault("HF_XET_CACHE", str(entry.root / "huggingface" / "xet"))
    import huggingface_hub as hub

    try:
        info = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None).model_info(
            repo, revision=revision, files_metadata=True
        )
        if known is not None and known.revision == info.sha:
            return known
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        result, taken = _choose(wanted, list(sizes), path)
        snapshot = _download(wanted, entry, repo, info.sha, {name: sizes[name] for name in taken})
    except SourceError:
        raise
    except Exception as error:
        if known is not None and _unanswered(error):
            log.warning("the Hub does not answer (%s): using what is cached of %s", _cause(error), wanted.uri)
            return known
        raise _explained(wanted, error, repo) from error
    return _manifest(wanted, entry, entry.name_of(snapshot), result, taken, info.sha)


def _download(wanted: Wanted, entry: Entry, repo: str, commit: str, sizes: dict[str, int]) -> Path:
    """The snapshot's folder, with all of the files (name -> size in bytes) in it and whole."""
    import huggingface_hub as hub

    folder = entry.root / "huggingface"
    hub.utils.disable_progress_bars()  # one kind of progress for all sources, and none of it in a pod's log
    with Progress(f"{repo} from the Hugging Face Hub", sum(sizes.values()) or None) as progress:
        for _ in range(2):
            with progress.watching(folder / f"models--{repo.replace('/', '--')}"):
                snapshot = Path(
                    hub.snapshot_download(
                        repo,
                        revision=commit,
                        allow_patterns=list(sizes),
                        cache_dir=folder,
                        endpoint=os.environ.get("HF_ENDPOINT") or None,
                    )
                )
            damaged = [name for name in sizes if _size(snapshot / name) != sizes[name]]
            if not damaged:
                return snapshot
            # huggingface_hub takes a file that is there as whole: out with it, and again.
            for name in damaged:
                (snapshot / name).resolve().unlink(missing_ok=True)
                (snapshot / name).unlink(missing_ok=True)
    cause = f"{damaged[0]} does not have the {sizes[damaged[0]]} bytes that the Hub says"
    raise SourceError(wanted.uri, cause, "Try again; the mirror (HF_ENDPOINT) may be at fault.")


def _manifest(wanted: Wanted, entry: Entry, snapshot: str, result: str, taken: list[str], commit: str) -> Manifest:
    files = {}
    for name in taken:
        status = (entry.root / snapshot / name).stat()
        files[f"{snapshot}/{name}"] = FileRecord(status.st_size, "", int(status.st_mtime))
    if result:
        check_sha256(wanted, sha256_of(entry.root / snapshot / result) if wanted.sha256 else "")
    elif wanted.sha256 is not None:
        hint = "Name one file in the URI, or leave the checksum out and give a commit as the revision."
        raise SourceError(wanted.uri, "a checksum was given, but the model is a folder", hint)
    return Manifest(f"{snapshot}/{result}" if result else snapshot, files, commit)


def _choose(wanted: Wanted, names: list[str], path: str) -> tuple[str, list[str]]:
    """The path in the snapshot to hand out ("" for all of it) and the files to download for it."""
    if path:
        if path not in names:
            raise SourceError(wanted.uri, f"the repository has no file {path!r}", f"It has: {_listed(names)}.")
        return path, [path]
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")]
    # Mistral's repositories hold the same weights twice; the index and the config describe the sharded ones.
    weights = [name for name in weights if not name.startswith("consolidated")] or weights
    if weights:
        return "", weights + [name for name in top if name.endswith(_BESIDE_WEIGHTS)]
    models = [name for name in names if name.endswith(".gguf")]
    if len(models) == 1:
        return models[0], models
    if models:
        hint = f"Add one to the URI: {_listed(models)}."
        raise SourceError(wanted.uri, f"the repository holds {len(models)} GGUF files", hint)
    hint = "Choose a repository with one of these formats, or convert the model (transformers' save_pretrained does)."
    raise SourceError(wanted.uri, "the repository holds no .safetensors or .gguf file", hint)


def _explained(wanted: Wanted, error: Exception, repo: str) -> SourceError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        hint = "Accept the model's terms on its page on the Hub, then set HF_TOKEN to a token of the same account."
        return SourceError(wanted.uri, f"access to {repo} is restricted", hint)
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(wanted.uri, f"{repo} has no such revision", "Check the branch, tag or commit behind the @.")
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "Check the spelling; for a private repository set HF_TOKEN to a token that may read it."
        return SourceError(wanted.uri, f"the Hub has no repository {repo}, or not for you", hint)
    hint = "Check the connection to the Hub (HF_ENDPOINT names another one), or download elsewhere and give a path."
    return SourceError(wanted.uri, f"the download failed: {_cause(error)}", hint)


def _unanswered(error: Exception) -> bool:
    """Whether the Hub was not reached or is out of order, rather than refused."""
    response: Any = getattr(error, "response", None)
    return response is None or response.status_code >= 500


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")

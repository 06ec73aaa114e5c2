"""Pushes an exported folder to the hub; the token is the hub client's, never printed or stored."""

import json
from pathlib import Path

from sage_unsloth.models.trained import EXPORT


def refuse_folder(base: str) -> None:
    """Raises ValueError if an adapter's base is a folder of this machine."""
    if Path(base).is_absolute() or Path(base).exists():
        raise ValueError(
            "an adapter on the hub must name a base on the hub, but this one names the folder "
            f"{Path(base).name!r}. Push that model merged, then export this adapter with --base-id"
        )


def push(folder: str | Path, repo_id: str, *, private: bool = True) -> str:
    """Uploads an export to a new or empty repository, and returns its address.

    Args:
        repo_id: "owner/name".

    Raises:
        ValueError: not an export, an adapter whose base is not on the hub, no token, or a
            repository with files.
        ConnectionError: the hub cannot be reached, or refuses; the export stays.
    """
    folder = Path(folder)
    if not (folder / EXPORT).exists():
        raise ValueError(
            f"only an export is pushed, a folder with {EXPORT}, got {folder}. Export it first"
        )
    config = folder / "adapter_config.json"
    if config.exists():
        base = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
        refuse_folder(base)
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    token = find_token()
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        present = sorted(set(api.list_repo_files(repo_id)) - {".gitattributes"})
        if present:
            raise ValueError(
                f"a push does not overwrite, but {repo_id} holds {present[0]}. Choose another "
                "--repo-id"
            )
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message="Export of sage_unsloth"
        )
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        # Without the original, whose request carries the token.
        reason = f"{type(error).__name__}: {error}".replace(token, "***").splitlines()[0]
        raise ConnectionError(
            f"the push to {repo_id} failed: {reason}. The export stays in {folder}, and the same "
            "command tries again"
        ) from None
    return f"https://huggingface.co/{repo_id}"


def find_token() -> str:
    """The token of the hub's client; ValueError without one."""
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        raise ValueError("pushing needs a token. Run `hf auth login`, or set HF_TOKEN")
    return token

"""Pages tried in a real browser, and texts that would break a page which does not escape them."""

import os
import shutil
import subprocess

import pytest

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "' onmouseover='document.title=1",
    "</span></div></section></body><h1>gone</h1>",
    "</style><style>body{display:none}</style>",
    "<!-- ",
    "]]>&lt;b&gt;&amp;",
    "\u202eevil\u202c",
    "\x00\x1b[31m\r",
    "\ud800",
    "\n",
    "  ",
    "",
    "é漢🙂",
)


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Runs headless Chromium on a page: its DOM, what it says on the console, or a screenshot."""
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        reason = "no Chromium on this machine (apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and CI is set")
        pytest.skip(reason)
    profile = tmp_path_factory.mktemp("profile")

    def run(file, *options):
        done = subprocess.run(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-background-networking",
                "--enable-logging=stderr",
                "--window-size=900,700",
                f"--user-data-dir={profile}",
                *options,
                file.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return run

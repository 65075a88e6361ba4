"""One Chromium for all that is looked at: a page is a tab, over the DevTools protocol through a pipe. No host name can be resolved."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

FOUND = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
AXE = Path(find_spec("axe_core_python").origin).parent / "axe.min.js"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --hide-scrollbars --mute-audio --remote-debugging-pipe"
).split()

# a shell could do it, but dash knows no number of two digits
HAND_OVER = "import os, sys; a, b, *command = sys.argv[1:]; os.dup2(int(a), 3), os.dup2(int(b), 4); os.execvp(command[0], command)"


class Chromium:
    def __init__(self, profile: Path):
        theirs, self.out = os.pipe()
        self.inp, ours = os.pipe()
        handed = [
            fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs, ours)
        ]  # above 4, so that neither is overwritten before it is moved
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                HAND_OVER,
                *map(str, handed),
                FOUND,
                *FLAGS,
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={profile}",
            ],
            pass_fds=handed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs, ours, *handed):
            os.close(end)
        self.rest = b""
        self.last = 0
        self.events = []

    def close(self):
        try:
            self.send("Browser.close")
        except (OSError, TimeoutError):
            pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.out), os.close(self.inp)

    def read(self, seconds: float) -> dict:
        "The next message."
        end = time.monotonic() + seconds
        while b"\0" not in self.rest:
            if not select.select([self.inp], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            got = os.read(self.inp, 1 << 20)
            if not got:
                raise OSError("Chromium has ended")
            self.rest += got
        one, _, self.rest = self.rest.partition(b"\0")
        return json.loads(one)

    def send(
        self, method: str, session: str | None = None, seconds: float = 300.0, **params
    ) -> dict:
        "A command, and its result; events that come meanwhile are kept."
        self.last += 1
        mine = self.last
        text = (
            json.dumps(
                {"id": mine, "method": method, "params": params}
                | ({"sessionId": session} if session else {})
            ).encode()
            + b"\0"
        )
        while text:
            text = text[os.write(self.out, text) :]
        while (got := self.read(seconds)).get("id") != mine:
            self.events.append(got)
        if "error" in got:
            raise RuntimeError(f"{method}: {got['error']['message']}")
        return got["result"]

    def open(
        self,
        address: str,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        first: str = "",
    ) -> "Tab":
        return Tab(self, address, width, height, dark, first)


class Tab:
    "A page that has loaded; `log` is what it complained of, `asked` every address that it wanted."

    def __init__(
        self, chromium: Chromium, address: str, width: int, height: int, dark: bool, first: str
    ):
        self.chromium = chromium
        self.target = chromium.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = chromium.send("Target.attachToTarget", targetId=self.target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.screen(width, height, dark)
        if first:
            self.send("Page.addScriptToEvaluateOnNewDocument", source=first)
        self.go(address)

    def send(self, method: str, **params) -> dict:
        return self.chromium.send(method, self.session, **params)

    def screen(self, width: int, height: int = 900, dark: bool = False):
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def go(self, address: str):
        self.chromium.events.clear()
        failed = self.send("Page.navigate", url=address).get("errorText")
        if failed:
            raise RuntimeError(f"{address}: {failed}")
        while not any(e.get("method") == "Page.loadEventFired" for e in self.mine()):
            self.chromium.events.append(self.chromium.read(300.0))

    def mine(self) -> list[dict]:
        return [e for e in self.chromium.events if e.get("sessionId") == self.session]

    def ask(self, script: str):
        "What a JavaScript expression, or its promise, comes to."
        got = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in got:
            raise RuntimeError(
                got["exceptionDetails"].get("exception", {}).get("description", script[:80])
            )
        return got["result"].get("value")

    def wait(self, condition: str, seconds: float = 120.0):
        "Until a JavaScript expression holds. The page may be on its way to another one meanwhile."
        end = time.monotonic() + seconds
        while not self.holds(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}")
            time.sleep(0.05)

    def holds(self, condition: str) -> bool:
        try:
            return self.ask(f"!!({condition})")
        except RuntimeError as e:
            if (
                "navigated or closed" in str(e)
                or "context was destroyed" in str(e)
                or "Cannot find context" in str(e)
            ):
                return False
            raise

    @property
    def log(self) -> list[str]:
        found = []
        for e in self.mine():
            p = e.get("params", {})
            if e.get("method") == "Runtime.exceptionThrown":
                found.append(
                    p["exceptionDetails"]
                    .get("exception", {})
                    .get("description", p["exceptionDetails"]["text"])
                )
            elif e.get("method") == "Runtime.consoleAPICalled" and p["type"] in ("error", "assert"):
                found.append(str([a.get("value") for a in p["args"]]))
            elif e.get("method") == "Log.entryAdded" and p["entry"]["level"] == "error":
                found.append(p["entry"]["text"] + " " + p["entry"].get("url", ""))
        return found

    @property
    def asked(self) -> list[str]:
        return [
            e["params"]["request"]["url"]
            for e in self.mine()
            if e.get("method") == "Network.requestWillBeSent"
        ]

    def barriers(self, place: str = "document") -> list:
        "What axe calls serious or critical: contrast, names of controls, roles, landmarks, what can be reached by key."
        if self.ask("typeof axe") == "undefined":
            self.ask(AXE.read_text("utf-8") + ";0")
        return self.ask(f"""axe.run({place}, {{resultTypes: ["violations"], iframes: false}}).then(r => r.violations
          .filter(v => ["serious", "critical"].includes(v.impact)).map(v => [v.id, v.nodes.map(n => n.target.join(" ") + ": " + n.failureSummary).slice(0, 3)]))""")

    def quiet(self) -> bool:
        "Nothing went wrong, and nothing was asked of another host."
        return not self.log and all(a.startswith(("file:", "data:", "blob:")) for a in self.asked)

    def close(self):
        self.chromium.send("Target.closeTarget", targetId=self.target)
        self.chromium.events.clear()

"""Chromium on the page of a model server: what it shows, models tried, errors, hostile texts, dark and narrow screens."""
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

address, hostile = sys.argv[1:3]
pictures = sys.argv[3] if len(sys.argv) > 3 else None


class Chromium:
    """Chromium without a window, driven by its DevTools protocol through two pipes: JSON messages that end with NUL."""

    def __init__(self):
        (theirs_in, to_it), (from_it, theirs_out) = os.pipe(), os.pipe()
        self.profile = tempfile.mkdtemp(prefix="millrace-chromium-")
        arguments = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={self.profile}", "--remote-debugging-pipe",
        ]
        wired = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["sh", "-c", wired, "sh", *arguments], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.to_it, self.from_it = os.fdopen(to_it, "wb", 0), os.fdopen(from_it, "rb", 0)
        self.rest, self.number, self.session, self.troubles = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log"]:
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.to_it.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.hear(answer)

    def read(self):
        while b"\0" not in self.rest:
            piece = self.from_it.read(1 << 16)
            assert piece, f"chromium ended with {self.process.wait()}"
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def hear(self, event):
        """Errors of scripts and violations of the policy; refused requests are the server's matter."""
        if event.get("method") == "Runtime.exceptionThrown":
            self.troubles.append(event["params"]["exceptionDetails"])
        entry = event.get("params", {}).get("entry")
        if event.get("method") == "Log.entryAdded" and entry["level"] == "error" and entry["source"] != "network":
            self.troubles.append(entry["text"])

    def evaluate(self, expression):
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, (expression, told["exceptionDetails"])
        return told["result"].get("value")

    def until(self, expression):
        """Waits until something is so on the page; says what the page had when it never was."""
        waiting = f"""new Promise((done) => {{
            const end = performance.now() + 60000;
            const look = () => {{
                const value = ({expression});
                value || performance.now() > end ? done(value) : setTimeout(look, 20);
            }};
            look();
        }})"""
        value = self.evaluate(waiting)
        assert value, (expression, self.evaluate("document.body.innerText"))
        return value

    def screen(self, width, height, scheme):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, name):
        if pictures:
            data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
            with open(os.path.join(pictures, f"{name}.png"), "wb") as file:
                file.write(base64.b64decode(data))

    def end(self):
        self.call("Browser.close")
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)


def infer(model, version, body):
    """The same request without a browser: status and reply."""
    url = f"http://{address}/v2/models/{model}/versions/{version}/infer"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


browser = Chromium()
browser.screen(1400, 1000, "light")
browser.call("Page.navigate", url=f"http://{address}/")

# What is served.
names = browser.until("document.querySelectorAll('nav .name').length === 3 && [...document.querySelectorAll('nav .name')].map((name) => name.textContent)")
assert names == ["broken", "digits", "echo"], names
browser.until("document.getElementById('server').textContent.includes('ready')")


def show(model, version):
    browser.evaluate(f"location.hash = '{model}/{version}'")
    browser.until(f"document.title.startsWith('{model}') && document.querySelector('.versions [aria-current]').textContent === 'version {version}'")


def cards():
    return browser.evaluate("Object.fromEntries([...document.querySelectorAll('.card')].map((card) => [card.ariaLabel, card.innerText]))")


show("digits", 2)
browser.until("document.querySelectorAll('.card').length === 4")
shown = cards()
for text in ["input", "logits", "FP32", "[any, 4]", "[any, 3]", "Up to"]:
    assert text in shown["Signature"], (text, shown["Signature"])
for text in [hostile, "records-topic: partition 0 up to 1,437", "120 steps, 3 epochs, seed 18446744073709551615", f"{hostile} 0.25", "SHA-256"]:
    assert text in shown["Lineage"], (text, shown["Lineage"])
assert browser.evaluate("document.querySelectorAll('img, b, main script, iframe').length") == 0
assert browser.evaluate("[...document.querySelectorAll('input, select, textarea')].every((field) => field.labels.length || field.ariaLabel)")


# A model tried: rows of our own.
def run(values, extents=()):
    """Fills the form and runs the model; `values` by input, as they are written."""
    for at, extent in extents:
        browser.evaluate(f"(field => {{ field.value = '{extent}'; field.dispatchEvent(new Event('input')); }})(document.getElementById('{at}'))")
    for at, text in enumerate(values):
        browser.evaluate(f"(field => {{ field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input')); }})(document.getElementById('input-{at}-values'))")
    browser.evaluate("document.querySelector('.result').replaceChildren()")
    browser.evaluate("document.getElementById('run').click()")
    browser.until("document.querySelector('.result').childElementCount > 0 && !document.getElementById('run').disabled")
    return browser.evaluate("""({
        refused: document.querySelector('.result [role=alert]')?.textContent,
        outputs: [...document.querySelectorAll('.result .output')].map((output) =>
            [...output.querySelectorAll('tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))),
    })""")


rows = [[1, 2, 3, 4], [-5, 6, -7, 8]]
request = {"inputs": [{"name": "input", "shape": [2, 4], "datatype": "FP32", "data": rows}]}
status, reply = infer("digits", 2, request)
assert status == 200, reply
logits = reply["outputs"][0]["data"]
told = run([json.dumps(rows)], [("input-0-0", 2)])
(output,) = told["outputs"]
assert len(output) == 2, told
for row, cells in enumerate(output):
    expected = logits[row * 3:row * 3 + 3]
    assert cells[0] == str(expected.index(max(expected))), (cells, expected)
    assert all(abs(float(cell) - value) <= 1e-5 * max(1, abs(value)) for cell, value in zip(cells[1:], expected, strict=True)), (cells, expected)

# The error as the server says it, and one that the page says itself.
status, reply = infer("digits", 2, {"inputs": [{**request["inputs"][0], "data": [1, 2, 3]}]})
told = run(["[1, 2, 3]"])
assert status == 400 and told["refused"] == f"400: {reply['error']}", (told, reply)
assert "no JSON list" in run(["1, 2"])["refused"]
# Values that the page fills in fit the shape, whatever it is.
browser.evaluate("(field => { field.value = 'random'; field.dispatchEvent(new Event('change')); })(document.getElementById('input-0-fill'))")
told = run([], [("input-0-0", 500)])
assert len(told["outputs"][0]) == 50 and "450 more rows" in browser.evaluate("document.querySelector('.result').innerText"), told
run([], [("input-0-0", 3)])

# It is counted.
browser.until("document.getElementById('live').innerText.includes('Answered')")
answered = "Number([...document.querySelectorAll('#live dt')].find((name) => name.textContent === 'Answered').nextSibling.innerText)"
browser.until(f"{answered} >= 4")

# Pictures for people, and the same page on a narrow screen: nothing sticks out.
for name, width, scheme in [("light", 1400, "light"), ("dark", 1400, "dark"), ("narrow", 360, "light"), ("narrow-dark", 360, "dark")]:
    browser.screen(width, 900, scheme)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
    browser.picture(name)
browser.screen(1400, 1000, "light")

# Whole numbers beyond a double's precision and texts that look like markup come back as they were.
show("echo", 1)
browser.until("document.querySelectorAll('fieldset').length === 2")
told = run(["[9007199254740993]", json.dumps([hostile])])
assert told["outputs"] == [[["9007199254740993"]], [[hostile]]], told
browser.picture("echo")

# A version that cannot be served says why.
browser.evaluate("location.hash = 'broken/1'")
browser.until("document.querySelector('main > [role=alert]')?.textContent")
assert "model.onnx" in browser.evaluate("document.querySelector('main > [role=alert]').textContent")
browser.picture("broken")
browser.evaluate("location.hash = 'nosuch/1'")
browser.until("document.querySelector('main > [role=alert]')?.textContent.includes('no such model')")

assert browser.evaluate("document.querySelectorAll('img, b, main script, iframe').length") == 0
assert not browser.troubles, browser.troubles
browser.end()
print(f"the page shows {len(names)} models and runs two of them")

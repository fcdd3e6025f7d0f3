"""The page itself: restarts survived, hostile names, keyboards, large fleets, widths and themes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from select_service.version import __version__
from tests.browser.fleet import BIG, book, call, register
from tests.browser.tab import Tab
from tests.deploy.tools import AXE
from tests.live.server import Server

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Serve = Callable[..., Server]
Tabs = Callable[..., Tab]

VIEWS = (
    *("fleet", "traffic", "admission", "decisions", "shadow", "prefix"),
    *("reservations", "replicas", "doctor", "about"),
)
HOSTILE = (
    '<img src=x onerror="window.pwned=1">',
    "<script>window.pwned=1</script>",
    '"><svg onload=window.pwned=1>',
    "javascript:window.pwned=1",
    "\u05e9\u05dc\u05d5\u05dd\u0301\u0301 </td></tr></table> &lt;b&gt; ${window.pwned=1}",
)


BROKEN = """() => [...document.querySelectorAll("td, th")]
  .filter((cell) => cell.checkVisibility() && cell.innerText.trim().length > 3)
  .filter((cell) => cell.clientHeight > 130)
  .map((cell) => `${cell.innerText}: ${cell.clientHeight} px`)"""
"""Cells so narrow that what they say stands in a column of letters."""


def test_numbers_that_change_move_nothing(serve: Serve, tab: Tabs) -> None:
    """A bar that grew over 0.4 s laid out the whole table each frame: a fifth of a processor."""
    server = serve()
    register(server, 1)
    page = tab(server)
    page.open("fleet")
    page.page.evaluate(
        "() => { window.moved = []; document.addEventListener('transitionrun',"
        " ({ propertyName }) => window.moved.push(propertyName)); }"
    )
    book(server, "a", 640)
    page.until('[data-key="1/0"]', "40 of 1,000")
    page.page.evaluate("() => new Promise(requestAnimationFrame)")
    assert page.page.evaluate("window.moved") == []


def test_bars_of_a_column_are_equally_long(serve: Serve, tab: Tabs) -> None:
    """One of 1,000 blocks had a shorter track than one of 512: half of it looked like a third."""
    server = serve()
    register(server, 1, total_kv_blocks=1_000_000)
    register(server, 2, total_kv_blocks=8)
    page = tab(server)
    page.open("fleet")
    page.until('[data-key="2/0"]', "0 of 8")
    widths = page.find("#content .bar-track").evaluate_all(
        "all => all.map((one) => Math.round(one.getBoundingClientRect().width))"
    )
    assert len(widths) == 4
    assert len({*widths[::2]}) == len({*widths[1::2]}) == 1


def test_a_restart_is_survived(serve: Serve, tab: Tabs) -> None:
    server = serve()
    register(server, 1)
    book(server, "a")
    page = tab(server)
    page.open("fleet")
    page.until('[data-key="1/0"]', "64")
    page.service_may_be_away = True
    server.stop()
    page.page.wait_for_selector("#connection[data-state=lost]")
    page.until("#connection", "last update")
    assert page.text("[data-vital=ready] dd") == "unknown"
    assert page.find("[data-vital=ready]").get_attribute("data-tone") is None
    assert page.text('[data-key="1/0"]'), "what was known stays to be read"
    assert page.find("#reconnect").is_visible()
    again = serve(port=server.port)
    register(again, 2)
    # in one step: it may come back by itself between a look and a click
    page.find("#reconnect").evaluate("button => button.checkVisibility() && button.click()")
    page.live()
    page.page.wait_for_selector('[data-key="2/0"]')
    assert page.order("fleet") == ["2/0"], "what is gone is gone"
    assert page.text("[data-vital=ready] dd") == "ready"
    page.open("traffic")
    page.page.wait_for_selector("[data-chart=rate] .restart", state="attached")
    book(again, "b")
    page.until("[data-vital=reservations]", "1")


def test_too_many_pages_are_refused(serve: Serve, tab: Tabs) -> None:
    server = serve("--console-clients-max", "1")
    first = tab(server)
    first.open("fleet")
    second = tab(server)
    second.page.goto(f"{second.origin}/console")
    second.until("#connection", "no more may be")
    first.page.goto("about:blank")
    second.live()
    for page in (first, second):
        page.complaints = [
            one for one in page.complaints if "503" not in one and "blank" not in one
        ]


def test_hostile_names_are_text(serve: Serve, tab: Tabs) -> None:
    server = serve("--admission-policy", "slo-shed")
    for number, name in enumerate(HOSTILE):
        register(
            server,
            number + 1,
            endpoint=name,
            model_name=name,
            tenant_id=name,
            taints=[name],
        )
        call(server, "POST", "/leases", {"lease_id": name, "owner": name, "ttl_s": 60})
        book(server, f"{number}{name}", lease_id=name, model_name=name, tenant_id=name)
    register(server, 99, endpoint=None, model_name=HOSTILE[0])
    page = tab(server)
    for view in (*VIEWS, "worker/1"):
        page.open(view)
        page.page.wait_for_timeout(700)
        assert page.page.evaluate("window.pwned") is None, view
        assert page.find("#content img, #content script, #content svg[onload]").count() == 0
        assert page.overflow() == 0, view
    page.open("fleet")
    assert page.rows("fleet")["1/0"]["Model · tenant"] == f"{HOSTILE[0]} · {HOSTILE[0]}"
    page.find("[data-key='1/0'] a").click()
    page.until("#content[data-view=worker] .facts", HOSTILE[0])
    page.open("decisions")
    page.find("[data-decision^='0']").first.click()
    page.until("#decision-title", HOSTILE[0])
    page.find("button:has-text('Who holds this prompt now?')").click()
    page.page.wait_for_selector("#content[data-view=prefix] [data-empty=no-holders]")
    assert page.page.evaluate("window.pwned") is None


def test_the_keyboard_is_enough(serve: Serve, tab: Tabs) -> None:
    server = serve()
    for worker_id in (1, 2, 3):
        register(server, worker_id)
    book(server, "a", allowed_worker_ids=[2])
    page = tab(server)
    page.open("fleet")
    keys = page.page.keyboard
    focused = "document.activeElement.innerText"
    keys.press("Tab")
    assert page.page.evaluate(focused) == "Skip to content"
    keys.press("Enter")
    assert page.page.evaluate("document.activeElement.id") == "content"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    for _ in range(30):
        keys.press("Tab")
        assert page.page.evaluate(outline) != "none", page.page.evaluate(focused)
        if page.page.evaluate(focused).startswith("Requests"):
            break
    keys.press("Enter")
    assert page.order("fleet")[0] == "2/0", "sorted by requests"
    assert page.page.evaluate("document.activeElement.closest('th').ariaSort") == "descending"
    for _ in range(30):
        keys.press("Tab")
        if page.page.evaluate(focused) == "2":
            break
    book(server, "b", allowed_worker_ids=[2])
    page.until('[data-key="2/0"]', "8 of 1,000")
    assert page.page.evaluate(focused) == "2", "numbers change, the focus stays"
    keys.press("Enter")
    page.page.wait_for_selector("#content[data-view=worker]")
    assert page.rows("ranks")["2/0"]["Trust"] == "100 %"
    for _ in range(30):
        keys.press("Tab")
        if page.page.evaluate(focused).startswith("Drain"):
            break
    keys.press("Enter")
    page.page.wait_for_selector("dialog[open]")
    assert page.page.evaluate("document.querySelector('dialog').contains(document.activeElement)")
    keys.press("Escape")
    page.page.wait_for_selector("dialog", state="detached")
    assert page.page.evaluate(focused).startswith("Drain"), "and comes back"
    keys.press("Enter")
    page.page.wait_for_selector("dialog[open]")
    page.page.evaluate("location.hash = 'traffic'")  # as the browser's way back does
    page.page.wait_for_selector("#content[data-view=traffic]")
    page.page.wait_for_selector("dialog", state="detached")
    page.find("#tabs a[data-view=doctor]").focus()
    keys.press("Enter")
    page.page.wait_for_selector("#content[data-view=doctor]")
    assert page.find("#tabs a[aria-current=page]").get_attribute("data-view") == "doctor"


def test_256_workers(serve: Serve, tab: Tabs) -> None:
    server = serve()
    for number in range(256):
        register(
            server,
            BIG - number,
            data_parallel_size=2,
            kv_events_endpoint=None,
            kv_events_endpoints={"0": "tcp://127.0.0.1:9", "1": "tcp://127.0.0.1:9"},
            model_name=f"model-{number % 4}",
        )
    for number in range(20):
        book(server, f"r{number}", 640, model_name=f"model-{number % 4}")
    page = tab(server, width=800)
    page.open("fleet")
    page.until("#fleet-shown", "512 rows")
    assert page.text("[data-card=workers] b") == "256 of 256"
    assert page.text("[data-card=requests] b") == "20"
    assert page.overflow() == 0
    assert len(page.rows("fleet")) == 300
    page.find("button.more").click()
    assert len(page.rows("fleet")) == 512
    page.find("th button:has-text('Requests')").click()
    rows = list(page.rows("fleet").values())
    asked = [int(row["Requests"]) for row in rows]
    assert asked == sorted(asked, reverse=True)
    assert sum(asked) == 20
    page.find("#fleet-filter").fill(f"model-3 {BIG - 3}")
    page.until("#fleet-shown", "2 of 512 rows")
    assert {row["Worker · rank"] for row in page.rows("fleet").values()} == {
        f"{BIG - 3} · 0",
        f"{BIG - 3} · 1",
    }
    page.find("#fleet-filter").fill("nobody")
    page.page.wait_for_selector("[data-empty=no-match]")
    page.find("#fleet-filter").fill("")
    book(server, "late", 64, allowed_worker_ids=[BIG - 200], model_name="model-0")
    page.until("[data-card=requests] b", "21")
    assert page.flaws() == []


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core here: make manifests")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(serve: Serve, tab: Tabs, theme: str) -> None:
    server = serve("--admission-policy", "slo-shed")
    register(server, 1)
    register(server, 2, endpoint=None)
    book(server, "a", 200)
    page = tab(server, theme=theme)
    found = {}
    for view in (*VIEWS, "decisions/a", "prefix/a", "worker/1"):
        page.open(view)
        page.page.wait_for_timeout(500)
        found[view] = page.axe()
    page.find("button:has-text('Drain')").click()
    page.page.wait_for_selector("dialog[open]")
    found["dialog"] = page.axe()
    assert {view: violations for view, violations in found.items() if violations} == {}


LIGHTNESS = """() => {
  const light = (name) => {
    const paper = document.createElement("canvas").getContext("2d");
    paper.fillStyle = getComputedStyle(document.body).getPropertyValue(name);
    paper.fillRect(0, 0, 1, 1);
    const bent = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...paper.getImageData(0, 0, 1, 1).data].map((v) => bent(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const ratio = (a, b) => Math.max(light(a) / light(b), light(b) / light(a));
  const key = (tone) => {
    const node = document.createElement("i");
    node.className = "piece";
    node.dataset.tone = tone;
    document.body.append(node);
    return getComputedStyle(node).backgroundImage;
  };
  const patterns = ["delay", "eviction", "credit", "disk"].map(key);
  return [ratio("--prefill", "--decode"), ratio("--device", "--host"), patterns];
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_parts_of_a_bar_differ_in_more_than_hue(serve: Serve, tab: Tabs, theme: str) -> None:
    page = tab(serve(), theme=theme)
    page.open("fleet")
    cost, tier, patterns = page.page.evaluate(LIGHTNESS)
    assert min(cost, tier) > 2
    assert all("gradient" in one for one in patterns)
    assert len(set(patterns)) == len(patterns)


def test_a_narrowed_view_has_an_address(serve: Serve, tab: Tabs) -> None:
    server = serve()
    register(server, 1, model_name="llama")
    register(server, 2)
    call(server, "POST", "/workers/2/drain", {})
    book(server, "a", model_name="llama")
    nobody = {"token_ids": [1], "model_name": "llama", "allowed_worker_ids": [9]}
    assert server.request("POST", "/select", nobody).status >= 400
    page = tab(server)
    page.open("fleet")
    page.find("#fleet-filter").fill("llama")
    page.until("#fleet-shown", "1 of 2 rows")
    page.open("fleet?only=draining")
    page.until("#fleet-shown", "1 of 2 rows")
    assert page.order("fleet") == ["2/0"]
    page.open("decisions")
    page.page.wait_for_selector("[data-decision=a]")
    page.find("#decisions-outcome").select_option("refused")
    page.page.wait_for_selector("[data-decision=a]", state="detached")
    page.page.wait_for_selector("#decision-list .pill:has-text('refused')")
    page.page.reload()
    page.live()
    page.page.wait_for_selector("#decision-list .pill:has-text('refused')")
    assert page.page.url.endswith("#decisions?outcome=refused")
    page.find("#decision-list button").click()
    page.page.wait_for_selector("#decision-title")
    assert page.page.url.endswith("?outcome=refused"), "one is picked, and the list stays narrowed"
    page.open("worker/1")
    page.find("a:has-text('Decisions for it')").click()
    page.page.wait_for_selector("[data-decision=a]")
    assert page.find("#decisions-worker").input_value() == "1"
    page.find("#decisions-model").select_option("default")
    page.page.wait_for_selector("[data-empty=no-match]")
    page.find("#tabs a[data-view=fleet]").click()
    page.page.wait_for_selector("#content[data-view=fleet]")
    page.page.go_back()
    page.page.wait_for_selector("[data-empty=no-match]")


def test_a_part_of_the_time_is_looked_at(serve: Serve, tab: Tabs) -> None:
    server = serve()
    register(server, 1)
    page = tab(server)
    page.open("traffic")
    page.page.wait_for_selector("[data-chart=rate] .u-over")
    page.until("[data-value=selections]", "/s")
    page.find("#range").select_option("1")
    assert page.page.url.endswith("#traffic?minutes=1")
    box = page.find("[data-chart=rate] .u-over").bounding_box()
    assert box is not None
    mouse, y = page.page.mouse, box["y"] + box["height"] / 2
    mouse.move(box["x"] + box["width"] * 0.5, y)
    mouse.down()
    mouse.move(box["x"] + box["width"] * 0.75, y, steps=4)
    mouse.up()
    page.until("#range-shown", " to ")
    shown = page.text("#range-shown")
    address = page.page.url
    begin, end = (int(part.partition("=")[2]) for part in address.partition("&")[2].split("&"))
    assert end - begin == pytest.approx(15_000, abs=1_000)
    page.page.goto("about:blank")
    page.page.goto(address)
    page.live()
    page.until("#range-shown", shown)
    assert page.flaws() == []
    page.find("[data-chart=latency] .chart").focus()
    page.page.keyboard.press("0")
    page.page.wait_for_selector("#range-whole", state="hidden")
    assert page.page.url.endswith("#traffic?minutes=1")
    page.page.keyboard.press("+")
    page.page.wait_for_selector("#range-whole")


def test_the_service_says_what_it_is(serve: Serve, tab: Tabs) -> None:
    grafana = "http://grafana.example/d/select-service"
    server = serve("--console-grafana-url", grafana, "--decision-ring", "77")
    page = tab(server)
    page.open("about")
    page.until("#version", __version__)
    page.page.wait_for_selector("[data-table=settings] [data-key=decision_ring]")
    row = page.rows("settings")["decision_ring"]
    assert (row["In force"], row["Set by"], row["Changes"]) == ("77", "flag", "with a restart")
    assert "log_format" not in page.rows("settings")
    page.find("#settings-only").uncheck()
    assert page.rows("settings")["log_format"]["Set by"] == "default"
    assert page.rows("settings").keys() == call(server, "GET", "/config")["settings"].keys()
    assert page.flaws() == []
    links = page.find(".links a").evaluate_all("all => all.map((one) => one.href)")
    for address in links:
        if address.startswith(page.origin):
            assert server.request("GET", address.removeprefix(page.origin)).status in {200, 503}
    assert grafana in links


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 420])
def test_widths_and_themes(serve: Serve, tab: Tabs, theme: str, width: int) -> None:
    server = serve("--admission-policy", "slo-shed")
    register(server, BIG, model_name="meta-llama/Llama-3.3-70B-Instruct-with-a-long-name")
    register(server, 2, endpoint=None)
    for number in range(3):
        book(
            *(server, f"request-{number}-7d0b7b9e-3c0e-4a7c-9a50-cc14a6c1f6c2", 200),
            model_name="meta-llama/Llama-3.3-70B-Instruct-with-a-long-name",
        )
    page = tab(server, width=width, theme=theme)
    for view in (*VIEWS, f"worker/{BIG}"):
        page.open(view)
        page.page.wait_for_timeout(300)
        assert page.overflow() == 0, view
        assert page.flaws() == [], view
        assert page.page.evaluate(BROKEN) == [], view
    back = "getComputedStyle(document.body).backgroundColor"
    first = page.page.evaluate(back)
    other = "dark" if theme == "light" else "light"
    while page.text("#theme") != f"Theme: {other}":
        page.find("#theme").click()
    assert page.page.evaluate(back) != first
    assert page.flaws() == []
    page.page.reload()
    page.live()
    assert page.text("#theme") == f"Theme: {other}", "it is remembered"

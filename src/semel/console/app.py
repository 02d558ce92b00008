"""The console as an ASGI application: addresses, HTML or JSON, live updates, and the forms that act.

It renders on the server, and works without its script. Every page has a JSON twin: the same address with ``.json`` at
its end, or with ``Accept: application/json``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit

from semel.console import charts, words
from semel.console.gate import Access, Allow, Gate, TooManyTries
from semel.console.views import BadQuery, NotThere, View, Views, find_letter, letter_filter, letters_address
from semel.console.watched import COUNTED, Watched, watch_stores
from semel.console.ways import LONGEST_RESULT, MOST_LETTERS, Done, act, find_way, move_letters, refuse
from semel.core.messaging.messages import LetterFilter
from semel.core.policy import Duration, seconds
from semel.errors import MissingDependency, PolicyError, SemelError, StoreError
from semel.stores.sizing import size

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
    from starlette.routing import Match, Route
except ImportError as error:
    raise MissingDependency(error.name or "jinja2", "console") from error

Scope: TypeAlias = dict[str, Any]
LONGEST_QUERY: Final = 4096
LONGEST_BODY: Final = 32 * 1024
MOST_STREAMS: Final = 64
"""Pages that are kept up to date at the same time."""
EVERY: Final = 2.0
"""Seconds between two looks for a page that is kept up to date."""
STREAM: Final = 120.0
"""Seconds that a stream lasts. The browser opens it again, and is asked who it is again."""
READY: Final = 3.0
"""Seconds for which a server that starts waits for the stores. Then it serves, and the pages say what is wrong."""
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FOLDER: Final = files("semel.console") / "static"
_STATIC: Final = {
    "console.css": ("text/css; charset=utf-8", (_FOLDER / "console.css").read_bytes()),
    "console.js": ("text/javascript; charset=utf-8", (_FOLDER / "console.js").read_bytes()),
    "icon.svg": ("image/svg+xml", (_FOLDER / "icon.svg").read_bytes()),
}
_VERSION: Final = hashlib.sha256(b"".join(content for _, content in _STATIC.values())).hexdigest()[:12]
_log = logging.getLogger("semel.console")


@dataclass(frozen=True)
class Panel:
    """A part that an application adds to the top of the overview."""

    template: str
    """Jinja, which knows ``base`` and ``form``."""
    script: str
    """The address of its script."""


class Console:
    """The web console, to be mounted in an ASGI application or served by itself."""

    def __init__(
        self,
        watched: Watched | Mapping[str, Watched],
        *,
        token: str | None = None,
        allow: Allow | None = None,
        show_keys: bool = False,
        show_bodies: bool = False,
        running_too_long: Duration = "10m",
        trail_secret: bytes | None = None,
        panel: Panel | None = None,
    ) -> None:
        """
        :param watched: a guard, or the URL of a store; or several, by the names that they get in the console. A guard
            brings its secret and its key ring.
        :param token: whoever knows it may look and act. They sign in, or send ``Authorization: Bearer …``.
        :param allow: instead of a token, a function of the Starlette ``Request`` that returns an ``Access``, or None to
            refuse. It may be async. For applications that know their users.
        :param show_keys: show keys in full to those with the token.
        :param show_bodies: show stored answers and the data of messages to those with the token.
        :param running_too_long: operations that run for longer are listed as stuck.
        :param trail_secret: the ``secret=`` of the services' trails, if they have one.
        :param panel: a section of the page that a demo adds.
        """
        self._gate = Gate(token, allow, show_keys=show_keys, show_bodies=show_bodies)
        self._views = Views(watch_stores(watched, trail_secret), seconds(running_too_long, "running_too_long"))
        self._pages = Pages(panel)
        self._streams = 0
        self._stopped = asyncio.Event()
        self._warming: asyncio.Future[None] | None = None
        views = self._views
        self._shown: dict[str, Callable[[Access, Mapping[str, str]], Awaitable[View]]] = {
            "/": views.overview,
            "/overview": views.overview,
            "/operations": views.operations,
            "/stuck": views.stuck,
            "/outbox": views.outbox,
            "/letters": views.letters,
            "/window": views.window,
        }
        pages = [*self._shown, "/records/{store}/{id}", "/letter/{store}/{at}"]
        forms = ["/records/{store}/{id}/{way}", "/letters/{what}"]
        self._gets = [Route(path, _nothing) for path in pages]
        self._forms = [Route(path, _nothing) for path in forms]
        twins = [f"{path}.json" for path in pages if path != "/"]
        self.paths = [*twins, *pages, *forms, "/search", "/sign-in", "/sign-out", "/live", "/static/{name}"]
        """The templates of all its addresses, for an application that serves it beside its own routes."""

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            response = await self._respond(Request(scope, receive))
            response.headers.update({name: text for name, text in _HEADERS.items() if name not in response.headers})
            await response(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._stopped.clear()
                self._warming = asyncio.ensure_future(self._views.warm())
                await asyncio.wait([self._warming], timeout=READY)
            else:
                await self.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    def stop_streams(self) -> None:
        """End the streams of live pages, so that a server can stop."""
        self._stopped.set()

    async def close(self) -> None:
        """Close the stores that were opened by their URLs. Guards that were passed in stay open."""
        self.stop_streams()
        if self._warming is not None:
            self._warming.cancel()
        for watched in self._views.watched.values():
            await watched.close()

    # -- one request

    async def _respond(self, request: Request) -> Response:
        began = time.perf_counter()
        path = _path(request)
        wants_json = path.endswith(".json") or _prefers_json(request)
        path = path.removesuffix(".json") or "/"
        page = _Page(
            request, self._gate, self._pages, wants_json=wants_json, several_stores=len(self._views.watched) > 1
        )
        try:
            response = await self._route(request, path, page)
        except TooManyTries:
            response = page.problem(429, "Too many wrong tokens", "Wait a second, and try again.")
            response.headers["Retry-After"] = "1"
        except (BadQuery, PolicyError) as error:
            response = page.problem(400, "This address asks for something else", str(error))
        except NotThere as error:
            response = page.problem(404, "Not here", str(error))
        except StoreError as error:
            response = page.problem(503, "The store does not answer", str(error))
        except SemelError as error:
            response = page.problem(500, "That did not work", str(error))
        except Exception:
            _log.exception("the console failed at %s", request.scope["path"])
            response = page.problem(500, "That did not work", "The reason is in the log of the console.")
        response.headers["Server-Timing"] = f"page;dur={(time.perf_counter() - began) * 1000:.1f}"
        return response

    async def _route(self, request: Request, path: str, page: _Page) -> Response:
        if path.startswith("/static/"):
            return _static(path.removeprefix("/static/"))
        if len(request.scope.get("query_string", b"")) > LONGEST_QUERY:
            return page.problem(414, "The address is too long", f"At most {LONGEST_QUERY} characters.")
        if request.method not in ("GET", "HEAD", "POST"):
            return page.problem(405, "The console knows GET and POST", "")
        form = await _form(request) if request.method == "POST" else {}
        if form is None:
            return page.problem(413, "The form is too long", f"At most {LONGEST_BODY} bytes.")
        if path == "/sign-in" and self._gate.has_token:
            return await self._sign_in(request, form, page)
        access = await self._gate.admit(request)
        if access is None:
            return page.closed()
        page.access = access
        if request.method == "POST":
            return await self._post(request, path, form, page)
        if path == "/live":
            return self._live(request, page)
        view = await self._view(path, access, request.query_params)
        if view is not None:
            return page.show(view)
        confirmed = _match(self._forms, path)
        if confirmed is not None and page.access.act:
            return await self._confirm(request, access, confirmed, page)
        if confirmed is not None:
            return page.problem(403, "You may look, and not act", "Acting needs a token.")
        return page.problem(404, "Not here", "There is no such page.")

    async def _view(self, path: str, access: Access, query: Mapping[str, str]) -> View | None:
        found = _match(self._gets, path)
        if found is None:
            return None
        if "id" in found:
            return await self._views.record(access, found["store"], _identity(found["id"]))
        if "at" in found:
            return await self._views.letter(access, found["store"], _position(found["at"]))
        return await self._shown[path](access, query)

    # -- signing in and out

    async def _sign_in(self, request: Request, form: Mapping[str, str], page: _Page) -> Response:
        if request.method != "POST":
            return page.closed(200)
        forged = self._gate.forged(request, form.get("form", ""))
        if forged:
            return page.problem(403, "Nobody was signed in", forged)
        if not await self._gate.check(form.get("token", "")):
            return page.closed(401, "This is not the token.")
        response = page.redirect(_local(form.get("next", "")))
        self._gate.open_session(request, response)
        return response

    async def _post(self, request: Request, path: str, form: Mapping[str, str], page: _Page) -> Response:
        access = page.access
        assert access is not None
        forged = self._gate.forged(request, form.get("form", ""))
        if forged:
            refuse(access, path, forged)
            return page.problem(403, "Nothing was done", f"Nothing was done: {forged}.")
        if path == "/sign-out":
            response = page.redirect("/")
            self._gate.close_session(request, response)
            return response
        if path == "/search":
            return await self._search(page, access, form)
        found = _match(self._forms, path)
        if found is None:
            return page.problem(404, "Not here", "There is no such form.")
        if not access.act:
            refuse(access, path, "read-only")
            return page.problem(403, "You may look, and not act", "Nothing was done: acting needs a token.")
        return await (self._act if "id" in found else self._move)(page, access, found, form)

    async def _search(self, page: _Page, access: Access, form: Mapping[str, str]) -> Response:
        found = await self._views.search(access, form)
        if found is None:
            return page.problem(
                404, "No record has this key",
                "It may have expired, belong to a tenant that was not named, or to an operation that has not run "
                "lately: name the operation and the tenant.",
            )  # fmt: skip
        return page.redirect(f"/records/{found[0]}/{found[1]}")

    # -- acting

    async def _confirm(self, request: Request, access: Access, found: Mapping[str, str], page: _Page) -> Response:
        """Show what an act would do, with the button that does it."""
        if "id" in found:
            way = find_way(found["way"])
            view = await self._views.record(access, found["store"], _identity(found["id"]))
            if way is None or way.name not in [each["name"] for each in view["ways"]]:
                return page.problem(409, "This is not possible", f"The record is {view['state']}.")
            return page.show({**view, "page": "confirm", "way": way._asdict()})
        view = await self._views.letters(access, request.query_params)
        if found["what"] not in ("redrive", "purge") or not view["store"]:
            return page.problem(404, "Not here", "There is no such form.")
        position = request.query_params.get("position", "")
        chosen = None
        if position:
            chosen = (await self._views.letter(access, view["store"], _position(position)))["letter"]
        back = letters_address(view["store"], request.query_params)
        return page.show(
            {**view, "page": "confirm_letters", "what": found["what"], "letter": chosen, "most": MOST_LETTERS,
             "back": back}
        )  # fmt: skip

    async def _act(self, page: _Page, access: Access, found: Mapping[str, str], form: Mapping[str, str]) -> Response:
        watched, way, id = self._views.find(found["store"]), find_way(found["way"]), _identity(found["id"])
        if way is None:
            raise NotThere("There is no such act.")
        token, result = form.get("token", ""), form.get("result", "") or "null"
        if len(result) > LONGEST_RESULT:
            raise BadQuery(f"a result has at most {LONGEST_RESULT} characters here")
        shown = words.whole_number(token, 19)
        done = await act(watched, access, way, id, shown, result, form.get("key") or None)
        return page.answer(done, f"/records/{watched.name}/{id.hex()}")

    async def _move(self, page: _Page, access: Access, found: Mapping[str, str], form: Mapping[str, str]) -> Response:
        what = found["what"]
        watched = self._views.find(form.get("store", ""))
        if what not in ("redrive", "purge") or not watched.has_messages:
            raise NotThere("There is no such act.")
        limit = words.whole_number(form.get("count", ""), 8)
        if not limit:
            raise BadQuery("count is how many dead letters the page has shown")
        filter = letter_filter(form)
        if form.get("position"):
            letter = await find_letter(watched, _position(form["position"]))
            filter = LetterFilter(message=letter.message.id, origin=letter.origin)
        done = await move_letters(watched, access, what, filter, limit)
        return page.answer(done, letters_address(watched.name, form))

    # -- keeping a page up to date

    def _live(self, request: Request, page: _Page) -> Response:
        """Send the live part of a page whenever it has changed."""
        access = page.access
        assert access is not None
        try:
            address = urlsplit(request.query_params.get("of", "/"))
            query = dict(parse_qsl(address.query, max_num_fields=50))
        except ValueError:
            raise BadQuery("of is the address of a page of this console") from None
        if self._streams >= MOST_STREAMS or _match(self._gets, address.path) is None:
            return page.problem(503 if self._streams >= MOST_STREAMS else 404, "Not live", "Reload the page.")
        return StreamingResponse(
            self._changes(page, access, address.path, query), media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )  # fmt: skip

    async def _changes(self, page: _Page, access: Access, path: str, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        last, end = b"", time.monotonic() + STREAM
        self._streams += 1
        try:
            yield b"retry: 2000\n\n"
            while time.monotonic() < end and not self._stopped.is_set():
                try:
                    view = await self._view(path, access, query)
                    part = b"" if view is None else page.live_part(view).encode()
                except Exception as error:  # the page shows what it had; the next look may succeed
                    part = last
                    yield b"event: trouble\ndata: %s\n\n" % json.dumps(str(error)[:200]).encode()
                if part != last:
                    last = part
                    yield b"data: %s\n\n" % json.dumps(part.decode()).encode()
                else:
                    yield b": the same\n\n"
                try:
                    await asyncio.wait_for(self._stopped.wait(), EVERY)
                except TimeoutError:
                    continue
        finally:
            self._streams -= 1


@cache
def _environment() -> Environment:
    """All templates, compiled: no page waits for that."""
    environment = Environment(
        loader=PackageLoader("semel.console"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, auto_reload=False,
    )  # fmt: skip
    environment.filters.update(
        capped=partial(words.capped, most=COUNTED),
        count=words.count,
        rate=words.rate,
        percent=words.percent,
        duration=words.duration_or_dash,
        size=size,
        json=words.as_json,
    )
    environment.globals.update(
        sparkline=charts.sparkline, bars=charts.bars, shape=charts.shape, version=_VERSION, query=urlencode
    )
    for name in environment.list_templates():
        environment.get_template(name)
    return environment


class Pages:
    """The templates."""

    def __init__(self, panel: Panel | None) -> None:
        self._environment = _environment()
        self._panel = {
            "panel": None if panel is None else self._environment.from_string(panel.template),
            "panel_script": None if panel is None else panel.script,
        }

    def render(self, name: str, **values: Any) -> str:
        """Return a page."""
        return self._environment.get_template(f"{name}.html").render(self._panel, **values)

    def render_live(self, name: str, **values: Any) -> str:
        """Return the part of a page that is kept up to date."""
        template = self._environment.get_template(f"{name}.html")
        block = template.blocks.get("live")
        return "" if block is None else "".join(block(template.new_context({**self._panel, **values})))


class _Page:
    """The page that one request asks for, as HTML or JSON."""

    def __init__(self, request: Request, gate: Gate, pages: Pages, *, wants_json: bool, several_stores: bool) -> None:
        self._request = request
        self._gate = gate
        self._pages = pages
        self._json = wants_json
        self._several_stores = several_stores
        self._base = request.scope.get("root_path", "").rstrip("/")
        query = request.scope.get("query_string", b"").decode("latin-1")
        self._address = _path(request) + (f"?{query}" if query else "")
        self._form, self._new_cookie = gate.form_token(request)
        self.access: Access | None = None

    def show(self, view: View, status: int = 200) -> Response:
        if self._json:
            return JSONResponse(view, status)
        response = HTMLResponse(self._pages.render(view["page"], **self._values(view)), status)
        if self._new_cookie is not None:
            self._gate.remember(self._request, response, self._new_cookie)
        return response

    def live_part(self, view: View) -> str:
        return self._pages.render_live(view["page"], **self._values(view))

    def _values(self, view: View) -> dict[str, Any]:
        return {
            "view": view,
            "base": self._base,
            "form": self._form,
            "access": self.access,
            "several": self._several_stores,
            "signed_in": self.access is not None and self._gate.has_token,
            "address": self._address,
        }

    def problem(self, status: int, title: str, text: str) -> Response:
        return self.show({"page": "problem", "status": status, "title": title, "text": text}, status)

    def closed(self, status: int | None = None, text: str = "") -> Response:
        """The answer to somebody who may not look."""
        if not self._gate.has_token:
            return self.problem(403, "The console is closed", "You may not look at this console.")
        status = status or 401
        view = {"page": "sign_in", "status": status, "title": "Sign in", "text": text, "next": "/"}
        if self._request.method == "GET" and not _path(self._request).startswith(("/live", "/sign-in")):
            view["next"] = self._address
        response = self.show(view, status)
        if status == 401:
            response.headers["WWW-Authenticate"] = 'Bearer realm="semel console"'
        return response

    def redirect(self, path: str) -> Response:
        if self._json:
            return JSONResponse({"location": self._base + path})
        return RedirectResponse(self._base + path, 303)

    def answer(self, done: Done, back: str) -> Response:
        """Say what came of an act."""
        view = {"page": "done", "changed": done.changed, "text": done.text, "back": back}
        return self.show(view, 200 if done.changed else 409)


async def _nothing(request: Request) -> Response:
    """Routes are used to match addresses only."""
    return Response()


def _match(routes: list[Route], path: str) -> dict[str, str] | None:
    for route in routes:
        match, child = route.matches({"type": "http", "method": "GET", "path": path, "root_path": ""})
        if match is Match.FULL:
            found: dict[str, str] = child["path_params"]
            return found
    return None


def _path(request: Request) -> str:
    """The address below the place where the console is mounted."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", "")) or "/"


def _prefers_json(request: Request) -> bool:
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted


def _identity(text: str) -> bytes:
    try:
        id = bytes.fromhex(text) if len(text) == 32 else b""
    except ValueError:
        id = b""
    if not id:
        raise NotThere("The identity of a record has 32 hexadecimal digits.")
    return id


def _position(text: str) -> int:
    number = words.whole_number(text)
    if number is None:
        raise NotThere("The position of a dead letter is a number.")
    return number


def _local(path: str) -> str:
    """An address of this console to go on to: nothing that a browser could take for another site."""
    plain = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if plain and len(path) <= LONGEST_QUERY else "/"


async def _form(request: Request) -> dict[str, str] | None:
    """The fields of a form or of a JSON object; None if it is too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST_BODY:
            return None
    text = body.decode("utf-8", "replace")
    if request.headers.get("content-type", "").partition(";")[0].strip() == "application/json":
        try:
            content = json.loads(text or "{}")
            json.dumps(content, ensure_ascii=False).encode()
        except ValueError:
            raise BadQuery("the body is not JSON") from None
        if not isinstance(content, dict) or len(content) > 50:
            raise BadQuery("the body is not a JSON object of a few fields")
        return {str(name): each if isinstance(each, str) else json.dumps(each) for name, each in content.items()}
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=50))
    except ValueError:
        raise BadQuery("the form has too many fields") from None


def _static(name: str) -> Response:
    if name not in _STATIC:
        return Response(status_code=404)
    kind, content = _STATIC[name]
    return Response(content, media_type=kind, headers={"Cache-Control": "public, max-age=31536000, immutable"})

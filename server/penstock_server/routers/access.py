"""Tokens, login codes and browser sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import select

from penstock.errors import Bug
from penstock_server.auth.principal import authenticated, scoped, unauthenticated
from penstock_server.auth.secrets import TokenKind
from penstock_server.auth.tokens import LOGIN_S, SESSION_S, Minted
from penstock_server.description import problems
from penstock_server.guard import count_wrong, origin_allowed
from penstock_server.problems import Problem
from penstock_server.routers.deps import Asker, Id, PageSize, PageToken, Server
from penstock_server.schemas import api
from penstock_server.services.pages import DEFAULT_SIZE
from penstock_server.services.views import columns
from penstock_server.tables import TokenRow

router = APIRouter(prefix="/api/v1", tags=["access"])

MAX_TIME_S = 4_102_444_800.0  # 2100
TIME = "seconds since 1970, UTC; `until_s` is not included"
_BROWSER_SCOPES = ("read", "submit", "admin")


@router.get("/me", operation_id="getMe")
@authenticated
async def get_me(asker: Asker) -> api.Me:
    """Return the principal of the request."""
    return api.Me(name=asker.name, scopes=sorted(asker.scopes))


@router.post("/tokens", status_code=201, operation_id="createToken")
@scoped("admin")
async def create_token(server: Server, body: api.TokenRequest) -> api.TokenMade:
    """Make a token; its secret is in this answer and nowhere else."""
    async with server.database.write() as tx:
        minted = server.tokens.mint(tx, "user", body.name, body.scopes, expires_in_s=body.expires_in_s)
    return api.TokenMade(**columns(api.Token, minted.row), token=minted.secret)


@router.get("/audit", operation_id="listAudit")
@scoped("admin")
async def list_audit(
    server: Server,
    token: Annotated[str | None, Query(max_length=255, description="its id or name", examples=["admin"])] = None,
    subject: Annotated[str | None, Query(max_length=255, description="what was changed", examples=["default"])] = None,
    since_s: Annotated[float | None, Query(ge=0, le=MAX_TIME_S, description=TIME, examples=[1_767_225_600])] = None,
    until_s: Annotated[float | None, Query(ge=0, le=MAX_TIME_S, description=TIME, examples=[1_767_312_000])] = None,
    page_size: PageSize = DEFAULT_SIZE,
    page_token: PageToken = None,
) -> api.Page[api.AuditEntry]:
    """List the requests that changed something, and refused ones beyond the limit of wrong tokens; newest first."""
    return await server.audit.page(
        by=token, subject=subject, since_s=since_s, until_s=until_s, size=page_size, token=page_token
    )


@router.get("/tokens", operation_id="listTokens")
@scoped("admin")
async def list_tokens(server: Server) -> api.Items[api.Token]:
    """List tokens of people and nodes, and join tokens of clusters, oldest first, without their secrets."""
    statement = select(TokenRow).where(TokenRow.kind.in_(["user", "node", "pilot"])).order_by(TokenRow.id)
    async with server.database.read() as session:
        rows = (await session.execute(statement)).scalars().all()
    items = [api.Token(**{**columns(api.Token, row), "last_used_at": server.tokens.last_used(row)}) for row in rows]
    return api.Items(items=items)


@router.delete("/tokens/{token_id:id}", status_code=204, operation_id="revokeToken", responses=problems(409))
@scoped("admin")
async def revoke_token(server: Server, token_id: Id) -> None:
    """Revoke a token for good."""
    await server.tokens.revoke(token_id)


@router.post("/join-tokens", status_code=201, operation_id="createJoinToken")
@scoped("admin")
async def create_join_token(server: Server, body: api.JoinTokenRequest | None = None) -> api.OneTimeToken:
    """Make a token with which one node can join, or, if it is reusable, any number of them."""
    asked = body or api.JoinTokenRequest()
    kind: TokenKind = "pilot" if asked.reusable else "join"
    async with server.database.write() as tx:
        minted = server.tokens.mint(tx, kind, "join token", [], expires_in_s=asked.expires_in_s)
    return api.OneTimeToken(id=minted.row.id, token=minted.secret, expires_at=_expiry(minted))


@router.post("/login-codes", status_code=201, operation_id="createLoginCode")
@scoped("admin")
async def create_login_code(server: Server) -> api.LoginCode:
    """Make a code that opens one browser session: `/login#code=<code>`."""
    async with server.database.write() as tx:
        minted = server.tokens.mint(tx, "login", "login code", [], expires_in_s=LOGIN_S)
    return api.LoginCode(code=minted.secret, expires_at=_expiry(minted))


@router.post("/session", status_code=204, operation_id="openSession", responses=problems(401, 403, 429))
@unauthenticated  # the code in the body is what opens it, once
async def open_session(server: Server, request: Request, response: Response, body: api.SessionRequest) -> None:
    """Turn a login code into a session cookie."""
    origin = request.headers.get("origin")
    host, extra = request.headers.get("host"), server.settings.allowed_origins
    if origin is not None and not origin_allowed(origin, scheme=request.url.scheme, host=host, extra=extra):
        raise Problem(403, "foreign_origin", f"a page of {origin!r} may not log in here")
    async with server.database.write() as tx:
        if await server.tokens.take(tx, "login", body.code) is None:
            count_wrong(request, server)
            raise Problem(
                401,
                "login_code_refused",
                "the login code is unknown, expired or used",
                hint="make a new one with `penstock login-link`",
            )
        minted = server.tokens.mint(tx, "session", "browser", _BROWSER_SCOPES, expires_in_s=SESSION_S)
    response.set_cookie(
        server.tokens.cookie,
        minted.secret,
        max_age=int(SESSION_S),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


@router.delete("/session", status_code=204, operation_id="closeSession")
@authenticated
async def close_session(server: Server, asker: Asker, response: Response) -> None:
    """End the session of this cookie."""
    if asker.kind == "session":
        await server.tokens.revoke(asker.token_id)
    response.delete_cookie(server.tokens.cookie, httponly=True, samesite="strict")


def _expiry(minted: Minted) -> api.Timestamp:
    if minted.row.expires_at is None:
        raise Bug("a one-time token was made without an expiry: report it")
    return minted.row.expires_at

/** The bar on top: where one is, how live the page is, search, help, theme. */
import { computed } from "@preact/signals";
import { clock, integer } from "../format";
import { route } from "../router";
import { stream } from "../socket";
import { currentJob } from "../store/current";
import { isTerminal, type JobStore } from "../store/job";
import { nowMs, session, theme, toggleTheme } from "../store/session";
import { Link } from "./basics";
import { openHelp, openPalette } from "./overlays";

interface Badge {
  readonly tone: "ok" | "warn" | "bad" | "";
  readonly text: string;
  readonly more: string;
}

const QUIET_MS = 3000;

const badge = computed<Badge>(() => {
  const lost = stream.lostAt.value;
  // What is on the page is as old as what the server said last; a new attempt to connect makes it no newer.
  if (lost !== null && stream.state.value !== "closed") {
    return { tone: "bad", text: `offline · as of ${clock(new Date(lost).toISOString())}`, more: "· reconnecting" };
  }
  switch (stream.state.value) {
    case "connecting":
      return { tone: "", text: "connecting", more: "" };
    case "waiting":
      return { tone: "bad", text: "offline", more: "· reconnecting" };
    case "closed":
      return { tone: "", text: "not connected", more: "" };
    case "open":
      return openBadge();
  }
});

function openBadge(): Badge {
  const store = currentJob.value;
  const job = store?.job.value ?? null;
  if (store === null || job === null) return { tone: "ok", text: "live", more: "" };
  const dropped = lossOf(store);
  if (isTerminal(job)) return { tone: "", text: "finished", more: dropped };
  nowMs.value;
  const quietMs = performance.now() - store.lastFrameMs.value;
  const behind = store.behindMs.value;
  if (behind === null || quietMs === Number.POSITIVE_INFINITY)
    return { tone: "ok", text: "live", more: "· no events yet" };
  if (quietMs > QUIET_MS)
    return { tone: "warn", text: "quiet", more: `· no events for ${integer(quietMs / 1000)}\u00a0s ${dropped}` };
  return { tone: behind > 2000 ? "warn" : "ok", text: "live", more: `· ${integer(behind)}\u00a0ms behind ${dropped}` };
}

/** What is not shown of the whole job, or of what came to this page, and since when that is unknown. */
function lossOf(store: JobStore): string {
  const since = store.completeness.unknownSince.value;
  const rows = Math.max(store.droppedRows.value, store.completeness.dropped.value);
  return `· ${integer(rows)} dropped${since === null ? "" : `, unknown since ${clock(since)}`}`;
}

function LiveBadge() {
  const { tone, text, more } = badge.value;
  const title =
    currentJob.value?.completeness.found.value?.sentence ||
    "How far the newest operator event is behind now, and how many event rows were dropped on the way";
  return (
    <span class="live" title={title} data-testid="live">
      <i class={`dot ${tone}`} />
      <span>
        {text} <span class="more">{more}</span>
      </span>
      {stream.state.value === "waiting" && (
        <button type="button" class="btn small" onClick={() => stream.retryNow()}>
          Retry now
        </button>
      )}
    </span>
  );
}

function mayAdminister(): boolean {
  return session.value.state === "in" && session.value.scopes.includes("admin");
}

function Crumbs() {
  const at = route.value;
  const name = currentJob.value?.job.value?.name;
  return (
    <nav class="topnav" aria-label="Pages">
      <Link href="/" aria-current={at.page === "jobs" ? "page" : undefined}>
        Jobs
      </Link>
      {at.page === "job" && (
        <span class="clip">
          / <b>{name ?? at.jobId.slice(0, 8)}</b>
        </span>
      )}
      {at.page !== "job" && (
        <Link href="/nodes" aria-current={at.page === "nodes" ? "page" : undefined}>
          Nodes
        </Link>
      )}
      {at.page !== "job" && mayAdminister() && (
        <Link href="/tokens" aria-current={at.page === "tokens" ? "page" : undefined}>
          Tokens
        </Link>
      )}
      {at.page !== "job" && mayAdminister() && (
        <Link href="/webhooks" aria-current={at.page === "webhooks" ? "page" : undefined}>
          Webhooks
        </Link>
      )}
    </nav>
  );
}

export function Top() {
  return (
    <header class="top">
      <Link href="/" class="logo" aria-label="Penstock, jobs">
        <svg width="20" height="20" viewBox="0 0 20 20" aria-hidden="true">
          <path
            d="M2 4h5l6 12h5"
            fill="none"
            stroke="var(--accent)"
            stroke-width="3"
            stroke-linecap="round"
            stroke-linejoin="round"
          />
          <circle cx="16" cy="5" r="2.4" fill="var(--comm)" />
        </svg>
        <span class="narrow-hide">Penstock</span>
      </Link>
      {session.value.state === "in" && <Crumbs />}
      {session.value.state === "in" ? (
        <button type="button" class="search" onClick={openPalette} data-testid="search">
          <span>Search jobs, operators, views</span>
          <span class="key">Ctrl K</span>
        </button>
      ) : (
        <span class="grow" />
      )}
      {session.value.state === "in" && <LiveBadge />}
      <button
        type="button"
        class="btn icon tiny-hide"
        onClick={openHelp}
        aria-label="Keyboard help"
        title="Keyboard help (?)"
      >
        ?
      </button>
      <button
        type="button"
        class="btn icon"
        onClick={toggleTheme}
        aria-label={`Switch to ${theme.value === "dark" ? "light" : "dark"} theme`}
        title="Theme (t)"
        data-testid="theme"
      >
        ◐
      </button>
    </header>
  );
}

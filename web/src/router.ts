/** The address is the state of the view: path and query are signals, and every link can be shared. */
import { computed, signal } from "@preact/signals";

const href = signal(location.pathname + location.search + location.hash);

addEventListener("popstate", () => {
  href.value = location.pathname + location.search + location.hash;
});

export const url = computed(() => new URL(href.value, location.origin));

export const TABS = [
  ["overview", "Overview"],
  ["graph", "Graph"],
  ["timeline", "Timeline"],
  ["sync", "Gradient sync"],
  ["metrics", "Metrics"],
  ["advice", "Advice"],
  ["logs", "Logs"],
  ["events", "Events"],
  ["config", "Config"],
] as const;
export type Tab = (typeof TABS)[number][0];

export type Route =
  | { readonly page: "login" }
  | { readonly page: "jobs" }
  | { readonly page: "nodes" }
  | { readonly page: "tokens" }
  | { readonly page: "webhooks" }
  | { readonly page: "job"; readonly jobId: string; readonly tab: Tab; readonly op: number | null }
  | { readonly page: "missing"; readonly path: string };

export function parseRoute(at: URL): Route {
  const path = at.pathname.replace(/\/+$/, "") || "/";
  if (path === "/login") return { page: "login" };
  if (path === "/" || path === "/jobs") return { page: "jobs" };
  if (path === "/nodes") return { page: "nodes" };
  if (path === "/tokens") return { page: "tokens" };
  if (path === "/webhooks") return { page: "webhooks" };
  const job = /^\/jobs\/([^/]+)$/.exec(path)?.[1];
  if (job === undefined) return { page: "missing", path };
  const wanted = at.searchParams.get("tab");
  const tab = TABS.find(([id]) => id === wanted)?.[0] ?? "overview";
  const op = at.searchParams.get("op");
  const jobId = decoded(job);
  if (jobId === null) return { page: "missing", path };
  return { page: "job", jobId, tab, op: op !== null && /^\d+$/.test(op) ? Number(op) : null };
}

/** null where a percent sign begins no character. */
function decoded(part: string): string | null {
  try {
    return decodeURIComponent(part);
  } catch (error) {
    if (error instanceof URIError) return null;
    throw error;
  }
}

export const route = computed(() => parseRoute(url.value));

/** The operator that the address names: no other field of it changes this. */
export const linkedOp = computed(() => (route.value.page === "job" ? route.value.op : null));

/** Go to `to` inside the page. `replace` for what the back button should skip (a selection, a filter). */
export function navigate(to: string, how: "push" | "replace" = "push"): void {
  if (to === href.value) return;
  if (how === "push") history.pushState(null, "", to);
  else history.replaceState(null, "", to);
  href.value = to;
}

/** Set or clear query fields of the present address, leaving the others as they are. */
export function setQuery(fields: Readonly<Record<string, string | null>>, how: "push" | "replace" = "replace"): void {
  const next = new URL(url.value);
  for (const [name, value] of Object.entries(fields)) {
    if (value === null) next.searchParams.delete(name);
    else next.searchParams.set(name, value);
  }
  navigate(next.pathname + next.search, how);
}

export function jobHref(jobId: string, tab: Tab = "overview"): string {
  const path = `/jobs/${encodeURIComponent(jobId)}`;
  return tab === "overview" ? path : `${path}?tab=${tab}`;
}

/** Keys that work anywhere on the page. Canvases handle their own; typing in a field is never taken away. */
import { openHelp, openPalette, overlayOpen } from "./parts/overlays";
import { jobHref, navigate, route, setQuery, TABS } from "./router";
import { currentGraph, currentTimeline } from "./store/current";
import { toggleTheme } from "./store/session";
import { moveStep } from "./views/strip";

let leader = false;

function typing(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.closest("input, select, textarea, dialog") !== null;
}

/** The graph and the table that stands in for it. */
const TWINS = "[data-testid=graph], [data-testid=operator-table]";

const PLAIN: Readonly<Record<string, () => void>> = {
  "?": openHelp,
  "/": openPalette,
  t: toggleTheme,
  f: () => {
    currentGraph.value?.fit();
    currentTimeline.value?.fit();
  },
  ".": () => currentTimeline.value?.hold(!currentTimeline.value.held.value),
  v: () => {
    const at = route.value;
    if (at.page !== "job") return;
    const shown = new URLSearchParams(location.search).get("view") === "table";
    const inside = document.activeElement?.matches(TWINS) === true;
    setQuery({ view: shown ? null : "table" });
    // After the next rendering the other one is there; the keyboard goes on in it.
    if (inside) setTimeout(() => document.querySelector<HTMLElement>(TWINS)?.focus());
  },
  Escape: () => {
    if (route.value.page === "job") setQuery({ op: null });
    currentGraph.value?.select(-1);
  },
  e: () => currentGraph.value?.expandAll(),
  c: () => currentGraph.value?.setExpanded(new Set()),
};

const TIMELINE: Readonly<Record<string, () => void>> = {
  "[": () => moveStep(-1),
  "]": () => moveStep(1),
  w: () => currentTimeline.value?.zoom(1.5),
  s: () => currentTimeline.value?.zoom(1 / 1.5),
  a: () => currentTimeline.value?.pan(120),
  d: () => currentTimeline.value?.pan(-120),
};

function afterLeader(key: string): void {
  if (key === "j") navigate("/");
  if (key === "n") navigate("/nodes");
}

function openTab(key: string): boolean {
  const at = route.value;
  const tab = TABS[Number(key) - 1];
  if (at.page !== "job" || tab === undefined) return false;
  navigate(jobHref(at.jobId, tab[0]));
  return true;
}

function onKeyDown(event: KeyboardEvent): void {
  if ((event.ctrlKey || event.metaKey) && event.key === "k") {
    event.preventDefault();
    openPalette();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (typing(event.target) || overlayOpen()) return;
  if (leader) {
    leader = false;
    afterLeader(event.key);
    return;
  }
  if (event.key === "g") {
    leader = true;
    return;
  }
  if (/^[1-8]$/.test(event.key) && openTab(event.key)) return;
  const action = PLAIN[event.key] ?? TIMELINE[event.key];
  if (action === undefined) return;
  event.preventDefault();
  action();
}

export function listenToKeys(): () => void {
  addEventListener("keydown", onKeyDown);
  return () => removeEventListener("keydown", onKeyDown);
}

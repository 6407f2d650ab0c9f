/** The user who is logged in, the theme, and the clock that ages are read against. */
import { effect, signal } from "@preact/signals";
import { ApiError, api } from "../api";
import { invalidateAll } from "../frameloop";
import { stream } from "../socket";

export type Session =
  | { readonly state: "asking" }
  | { readonly state: "in"; readonly name: string; readonly scopes: readonly string[]; readonly everywhere: boolean }
  | { readonly state: "out" }
  | { readonly state: "unreachable"; readonly error: ApiError };

export const session = signal<Session>({ state: "asking" });

/** What is of all projects, such as nodes, is changed by administrators of all projects alone. */
export function mayChangeNodes(): boolean {
  return session.value.state === "in" && session.value.everywhere && session.value.scopes.includes("admin");
}

const RETRY_MS = 3000;
let retry: ReturnType<typeof setTimeout> | undefined;

/** While the server cannot answer, the call is retried every few seconds. */
export async function askSession(): Promise<void> {
  clearTimeout(retry);
  try {
    const me = await api.me();
    session.value = { state: "in", name: me.name, scopes: me.scopes, everywhere: me.projects === null };
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const refused = error.status === 401 || error.status === 403;
    session.value = refused ? { state: "out" } : { state: "unreachable", error };
    if (refused) stream.close();
    else retry = setTimeout(() => void askSession(), RETRY_MS);
  }
}

stream.onRefused = () => {
  // A websocket that is refused has no reason; the session call does.
  if (session.value.state === "in") void recheck();
};

async function recheck(): Promise<void> {
  try {
    await api.me();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) {
      session.value = { state: "out" };
      stream.close();
    }
  }
}

export type Theme = "dark" | "light";
const THEME_KEY = "penstock.theme";
const prefersLight = matchMedia("(prefers-color-scheme: light)");

function storedTheme(): Theme | null {
  const value = localStorage.getItem(THEME_KEY);
  return value === "dark" || value === "light" ? value : null;
}

const chosenTheme = signal<Theme | null>(storedTheme());
const systemTheme = signal<Theme>(prefersLight.matches ? "light" : "dark");
prefersLight.addEventListener("change", () => {
  systemTheme.value = prefersLight.matches ? "light" : "dark";
});

export const theme = signal<Theme>(chosenTheme.value ?? systemTheme.value);
effect(() => {
  const next = chosenTheme.value ?? systemTheme.value;
  document.documentElement.dataset.theme = next;
  theme.value = next;
  invalidateAll();
});

export function toggleTheme(): void {
  const next: Theme = theme.value === "dark" ? "light" : "dark";
  localStorage.setItem(THEME_KEY, next);
  chosenTheme.value = next;
}

/** The time, once a second while the page is visible: ages and "no events for 5 s" are read against it. */
export const nowMs = signal(Date.now());
setInterval(() => {
  if (!document.hidden) nowMs.value = Date.now();
}, 1000);

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * Whether the server has another dashboard than this page. Asked when a connection was lost and is there again, as the
 * server may have been upgraded meanwhile: an older page does not understand all that a newer server sends.
 */
import { effect, signal } from "@preact/signals";
import { stream } from "../socket";

export const outdated = signal(false);

/** The path of the script that an index page loads; null if it loads none. The build puts a hash into it. */
export const scriptOf = (html: string): string | null => /<script[^>]*\ssrc="(\/[^"]+)"/.exec(html)?.[1] ?? null;

async function check(): Promise<void> {
  const own = document.querySelector("script[type=module]")?.getAttribute("src") ?? null;
  let html: string;
  try {
    const response = await fetch("/", { cache: "no-cache" });
    if (!response.ok) return;
    html = await response.text();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    return; // the connection is lost once more; the next one comes here, too
  }
  const served = scriptOf(html);
  if (own === null || served === null || served === own) return;
  outdated.value = true;
  // It is not looked at, and the address has the view.
  if (document.hidden) location.reload();
}

let opened = 0;

effect(() => {
  if (stream.state.value !== "open") return;
  opened += 1;
  if (opened > 1) void check();
});

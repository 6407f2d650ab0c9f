/** How a webhook stands, in words. Pure. */
import type { WebhookRow } from "../types";

/** "enabled", "paused until 12:00:05 UTC after 3 failures: …", or why it is disabled. */
export function standing(hook: Pick<WebhookRow, "disabled_at" | "next_at" | "failures" | "reason">): string {
  if (hook.disabled_at !== null) return hook.reason;
  if (hook.next_at === null) return "enabled";
  const failures = hook.failures === 1 ? "1 failure" : `${hook.failures} failures`;
  return `paused until ${hook.next_at.slice(11, 19)} UTC after ${failures}: ${hook.reason}`;
}

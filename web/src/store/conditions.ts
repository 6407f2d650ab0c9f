/** What keeps the server from storing what it receives, as it pushes it: one subscription for every view. */
import { signal } from "@preact/signals";
import { stream } from "../socket";
import type { ServerCondition } from "../types";

/** As the server sent them last. Empty: all is well. */
export const conditions = signal<readonly ServerCondition[]>([]);

/** Follow them until the function that is returned is called. */
export function followConditions(): () => void {
  const unsubscribe = stream.subscribe({
    request: () => ({ topic: "server" }),
    onMessage: (message) => {
      if (message.type === "conditions") conditions.value = message.conditions;
    },
  });
  return () => {
    unsubscribe();
    conditions.value = [];
  };
}

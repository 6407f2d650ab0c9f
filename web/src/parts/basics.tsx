/** Small parts that every view uses. */
import type { ComponentChildren, JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { ApiError } from "../api";
import { navigate } from "../router";

type Tone = "ok" | "warn" | "bad" | "quiet" | "accent";

/** A glyph besides the colour: state must be readable without seeing colours. */
const STATE: Readonly<Record<string, readonly [Tone, string]>> = {
  CREATED: ["quiet", "○"],
  QUEUED: ["warn", "◌"],
  STARTING: ["accent", "◔"],
  RUNNING: ["ok", "●"],
  RECOVERING: ["warn", "↻"],
  STOPPING: ["warn", "◑"],
  SUCCEEDED: ["ok", "✓"],
  FAILED: ["bad", "✕"],
  CANCELLED: ["quiet", "⊘"],
  ASSIGNED: ["quiet", "◌"],
  PREPARING: ["accent", "◔"],
  UNKNOWN: ["warn", "?"],
  EXITED: ["quiet", "■"],
  KILLED: ["bad", "✕"],
  LOST: ["bad", "✕"],
  READY: ["ok", "●"],
  JOINING: ["accent", "◔"],
  CORDONED: ["warn", "◑"],
  DRAINING: ["warn", "◑"],
  DRAINED: ["quiet", "○"],
  UNREACHABLE: ["bad", "?"],
  DOWN: ["bad", "✕"],
};

export function toneOf(state: string): Tone {
  return STATE[state]?.[0] ?? "quiet";
}

export function StateChip({ state }: { state: string }) {
  const [tone, glyph] = STATE[state] ?? (["quiet", "○"] as const);
  return (
    <span class={`chip tone-${tone}`} data-testid="state" data-state={state}>
      <span aria-hidden="true">{glyph}</span>
      {state}
    </span>
  );
}

/** A link inside the page; modified clicks keep their meaning. */
export function Link(props: JSX.IntrinsicElements["a"] & { href: string }) {
  return (
    // biome-ignore lint/a11y/noStaticElementInteractions: it has an href, which the rule does not see in a spread
    <a
      {...props}
      onClick={(event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
        event.preventDefault();
        navigate(props.href);
      }}
    />
  );
}

export function Progress({ share, tone, label }: { share: number; tone?: "done" | "bad"; label: string }) {
  const value = Math.round(Math.min(1, Math.max(0, share)) * 1000) / 10;
  return (
    <div
      class={`bar ${tone ?? ""}`}
      role="progressbar"
      aria-valuenow={value}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-label={label}
    >
      <i style={{ width: `${value}%` }} />
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty" data-testid="empty">
      <b>{title}</b>
      {children}
    </div>
  );
}

/** `subject`: what the error is of, where several things were asked for. */
export function ErrorCard({ error, subject, retry }: { error: ApiError; subject?: string; retry?: () => void }) {
  return (
    <div class="error-card" role="alert" data-testid="error">
      <b>
        {subject !== undefined && `${subject}: `}
        {error.message}
      </b>
      {error.hint !== null && <div class="muted">{error.hint}</div>}
      {retry !== undefined && (
        <button type="button" class="btn small" onClick={retry}>
          Try again
        </button>
      )}
    </div>
  );
}

/** A column of a table: its label, the label and its classes, or that of a bar, which only screen readers read. */
export type Column = string | readonly [label: string, classes: string] | { bar: string; class?: string };

function HeadCell({ column }: { column: Column }) {
  if (typeof column === "string") return <th scope="col">{column}</th>;
  if ("bar" in column) {
    return (
      <th class={column.class}>
        <span class="sr">{column.bar}</span>
      </th>
    );
  }
  return (
    <th scope="col" class={column[1]}>
      {column[0]}
    </th>
  );
}

export function Head({ columns }: { columns: readonly Column[] }) {
  return (
    <thead>
      <tr>
        {columns.map((column, index) => (
          <HeadCell key={index} column={column} />
        ))}
      </tr>
    </thead>
  );
}

/** A modal dialog; Escape and the backdrop close it, focus returns to where it was. */
export function Dialog(props: { label: string; onClose: () => void; class?: string; children: ComponentChildren }) {
  const element = useRef<HTMLDialogElement>(null);
  // Before the next paint: keys that are typed right after the one that opened it belong to the dialog.
  useLayoutEffect(() => {
    const dialog = element.current;
    dialog?.showModal();
    return () => dialog?.close();
  }, []);
  return (
    <dialog
      ref={element}
      class={props.class}
      aria-label={props.label}
      onCancel={(event) => {
        event.preventDefault();
        props.onClose();
      }}
      onClick={(event) => {
        if (event.target === element.current) props.onClose();
      }}
    >
      {props.children}
    </dialog>
  );
}

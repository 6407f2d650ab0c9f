/** Help and the command palette: both are open or not, wherever one is. */
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { jobHref, navigate, route, setQuery, TABS } from "../router";
import { currentGraph, currentJob, jobsStore } from "../store/current";
import { toggleTheme } from "../store/session";
import { Dialog } from "./basics";

const open = signal<"help" | "palette" | null>(null);

export const openHelp = (): void => {
  open.value = "help";
};
export const openPalette = (): void => {
  open.value = "palette";
};
export const overlayOpen = (): boolean => open.value !== null || document.querySelector("dialog[open]") !== null;
const close = (): void => {
  open.value = null;
};

const KEYS: readonly (readonly [string, string])[] = [
  ["?", "this help"],
  ["Ctrl K or /", "search jobs, operators and views"],
  ["g j · g n", "go to jobs · nodes"],
  [`1 … ${TABS.length}`, "tabs of a job"],
  ["t", "dark or light"],
  ["← ↑ → ↓", "graph: nearest box; timeline: slice and lane"],
  ["← · → · ↑ ↓", "graph, from an operator: its producers · its consumers · the others of these"],
  ["Shift ← ↑ → ↓", "graph: nearest box, from an operator too"],
  ["Enter", "graph: expand or collapse; timeline: select the operator"],
  ["e · c", "graph: expand all · collapse all"],
  ["f", "fit to the window"],
  ["+ · −", "graph: zoom"],
  ["w · s · a · d", "timeline: zoom in · out, pan left · right"],
  ["m · Shift drag", "timeline: measure between two slices · points"],
  ["[ · ]", "the sampled step before · after"],
  [".", "timeline: hold this step, or go back to live"],
  ["v", "table instead of graph or timeline"],
  ["Esc", "clear the selection, close a dialog"],
];

export function Overlays() {
  if (open.value === "help") return <Help />;
  if (open.value === "palette") return <CommandPalette />;
  return null;
}

function Help() {
  return (
    <Dialog label="Keyboard help" onClose={close}>
      <h2>Keyboard</h2>
      <div class="keys" data-testid="help">
        {KEYS.map(([key, what]) => (
          <>
            <span>
              <kbd>{key}</kbd>
            </span>
            <span class="muted">{what}</span>
          </>
        ))}
      </div>
      <div class="dialog-actions">
        <button type="button" class="btn" onClick={close}>
          Close
        </button>
      </div>
    </Dialog>
  );
}

interface Choice {
  readonly label: string;
  readonly kind: string;
  readonly run: () => void;
}

const MAX_CHOICES = 40;

function choices(): Choice[] {
  const at = route.value;
  const list: Choice[] = [];
  if (at.page === "job") {
    for (const [tab, label] of TABS) list.push({ label, kind: "view", run: () => navigate(jobHref(at.jobId, tab)) });
  }
  for (const job of jobsStore.value?.jobs.value ?? []) {
    list.push({ label: job.name, kind: `job · ${job.state.toLowerCase()}`, run: () => navigate(jobHref(job.id)) });
  }
  list.push({ label: "Jobs", kind: "page", run: () => navigate("/") });
  list.push({ label: "Nodes", kind: "page", run: () => navigate("/nodes") });
  list.push({ label: "Switch theme", kind: "action", run: toggleTheme });
  const graph = currentGraph.value;
  for (const group of graph?.groups ?? []) {
    list.push({
      label: `${group.label}${group.module === "" ? "" : `  ${group.module}`}`,
      kind: `box · ${group.bucket}`,
      run: () => graph?.showGroup(group.id),
    });
  }
  currentJob.value?.shownDocument.value?.ops.forEach((op, index) => {
    const where = op.replica < 0 ? "" : ` · replica ${op.replica}`;
    list.push({
      label: `${op.name}  ${op.module}`,
      kind: `operator #${index}${where}`,
      run: () => setQuery({ op: `${index}` }),
    });
  });
  return list;
}

function CommandPalette() {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const list = useRef<HTMLUListElement>(null);
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = choices()
    .filter((choice) => words.every((word) => `${choice.label} ${choice.kind}`.toLowerCase().includes(word)))
    .slice(0, MAX_CHOICES);
  useEffect(() => list.current?.children[at]?.scrollIntoView({ block: "nearest" }), [at]);
  const run = (choice: Choice | undefined) => {
    if (choice === undefined) return;
    close();
    choice.run();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const move = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (move !== 0) setAt(Math.min(found.length - 1, Math.max(0, at + move)));
    if (event.key === "Enter") run(found[at]);
    if (move !== 0 || event.key === "Enter") event.preventDefault();
  };
  return (
    <Dialog label="Search" class="palette" onClose={close}>
      <input
        placeholder="Jobs, operators, views"
        aria-label="Search jobs, operators and views"
        role="combobox"
        aria-expanded="true"
        aria-controls="palette-list"
        aria-activedescendant={`choice-${at}`}
        value={text}
        onKeyDown={onKeyDown}
        onInput={(event) => {
          setText(event.currentTarget.value);
          setAt(0);
        }}
      />
      <ul id="palette-list" role="listbox" ref={list} aria-label="Results">
        {found.map((choice, index) => (
          // biome-ignore lint/a11y/useFocusableInteractive: focus stays in the input (combobox pattern)
          <li id={`choice-${index}`} role="option" aria-selected={index === at} onClick={() => run(choice)}>
            <span class="clip">{choice.label}</span>
            <span class="faint">{choice.kind}</span>
          </li>
        ))}
        {found.length === 0 && <li class="muted">Nothing is called “{text}”.</li>}
      </ul>
    </Dialog>
  );
}

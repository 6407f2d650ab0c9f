/** Keys of the graph's canvas: along the uses of a chosen operator, from box to box, and what a screen reader says. */
import { signal } from "@preact/signals";
import type { TargetedKeyboardEvent } from "preact";
import { plural } from "../format";
import type { GraphController } from "../graph/controller";
import { along, beside, type Walked, walkedText } from "../graph/walk";
import { setQuery } from "../router";

const ARROWS: Readonly<Record<string, readonly [number, number]>> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

export class GraphKeys {
  /** What was gone to, for those who do not see it. */
  readonly said = signal("");
  #last: Walked | null = null;

  constructor(private readonly graph: GraphController) {}

  onKey(event: TargetedKeyboardEvent<HTMLCanvasElement>): void {
    const arrow = ARROWS[event.key];
    const middle = [event.currentTarget.clientWidth / 2, event.currentTarget.clientHeight / 2] as const;
    if (arrow !== undefined) {
      if (event.shiftKey || !this.#walk(...arrow)) this.#step(...arrow);
    } else if (event.key === "Enter" || event.key === " ") toggleSelected(this.graph);
    else if (event.key === "+" || event.key === "=") this.graph.zoom(1.25, ...middle);
    else if (event.key === "-") this.graph.zoom(1 / 1.25, ...middle);
    else return;
    event.preventDefault();
  }

  #step(dx: number, dy: number): void {
    this.graph.step(dx, dy);
    linkSelection(this.graph);
    const box = this.graph.layout?.boxes[this.graph.selected];
    if (box === undefined) return;
    this.said.value =
      box.op === null ? `${box.group.label}, ${plural(box.group.members.length, "operator")}` : box.op.name;
  }

  /** ← to what the chosen operator waits for, → to what waits for it, ↑ ↓ to the others of these. False: none is chosen. */
  #walk(dx: number, dy: number): boolean {
    const { layout, store } = this.graph;
    const [document, op] = [store.drawnDocument.value, this.#chosen()];
    if (layout === null || document === null || op === null) return false;
    const isShown = (one: number) => (layout.boxOfOp[one] ?? -1) >= 0;
    const next =
      dx !== 0
        ? along(document, op, dx < 0 ? "producers" : "consumers", isShown, this.#last)
        : beside(document, op, dy < 0 ? -1 : 1, isShown, this.#last);
    if (next === null) return false;
    this.#last = next;
    this.said.value = walkedText(document, next);
    if (next.op === op) return true;
    this.graph.reveal(next.op);
    if (store.stage.value === null) setQuery({ op: String(next.op) });
    return true;
  }

  /** Of operators that share a box the one that was gone to. */
  #chosen(): number | null {
    const { layout, selected } = this.graph;
    const box = layout?.boxes[selected];
    if (layout === null || box === undefined) return null;
    if (this.#last !== null && layout.boxOfOp[this.#last.op] === selected && box.op !== null) return this.#last.op;
    return box.op?.ops[0] ?? (box.group.ops.length === 1 ? (box.group.ops[0] ?? null) : null);
  }
}

export function toggleSelected(graph: GraphController): void {
  const box = graph.layout?.boxes[graph.selected];
  if (box !== undefined) graph.toggle(box.group.id);
}

/** The address names an operator; a group that is selected is a state of the page only. */
export function linkSelection(graph: GraphController): void {
  if (graph.store.stage.value !== null) return; // its operators have other numbers
  const box = graph.layout?.boxes[graph.selected];
  const op = box?.op?.ops[0] ?? (box !== undefined && box.group.ops.length === 1 ? box.group.ops[0] : undefined);
  setQuery({ op: op === undefined ? null : String(op) });
}

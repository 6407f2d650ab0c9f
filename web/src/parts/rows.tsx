/** Long lists: only the rows in view are in the document. Rows have one fixed height. */
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

interface Props {
  readonly count: number;
  readonly rowHeight: number;
  readonly row: (index: number) => ComponentChildren;
  /** Keep the end in view as rows are added. */
  readonly follow?: boolean;
  /** A row to show first; -1: none. */
  readonly at?: number;
  /** The person scrolled: away from the end, or back to it. */
  readonly onFollow?: (follow: boolean) => void;
  readonly label: string;
  readonly testid: string;
}

const OVERSCAN = 12;
const ROWS_ABOVE = 3;

export function VirtualRows(props: Props) {
  const element = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const pinned = useRef(false);
  useLayoutEffect(() => {
    const box = element.current;
    if (box === null) return;
    const observer = new ResizeObserver(() => setView({ top: box.scrollTop, height: box.clientHeight }));
    observer.observe(box);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    const box = element.current;
    if (box === null || props.follow !== true) return;
    pinned.current = true;
    box.scrollTop = box.scrollHeight;
  }, [props.count, props.follow, view.height]);
  useLayoutEffect(() => {
    const box = element.current;
    if (box === null || props.at === undefined || props.at < 0 || props.at >= props.count) return;
    box.scrollTop = Math.max(0, (props.at - ROWS_ABOVE) * props.rowHeight);
  }, [props.at, (props.at ?? 0) < props.count]);
  const onScroll = () => {
    const box = element.current;
    if (box === null) return;
    setView({ top: box.scrollTop, height: box.clientHeight });
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < props.rowHeight * 2;
    // Our own scroll to the end reports itself here too; only the person's may switch following off.
    if (pinned.current && atEnd) pinned.current = false;
    else if (!pinned.current && atEnd !== props.follow) props.onFollow?.(atEnd);
    else pinned.current = false;
  };
  const first = Math.max(0, Math.floor(view.top / props.rowHeight) - OVERSCAN);
  const last = Math.min(props.count, Math.ceil((view.top + view.height) / props.rowHeight) + OVERSCAN);
  const rows: ComponentChildren[] = [];
  for (let index = first; index < last; index++) rows.push(props.row(index));
  return (
    <div
      ref={element}
      class="loglist"
      onScroll={onScroll}
      tabIndex={0}
      role="log"
      aria-live="off"
      aria-label={props.label}
      data-testid={props.testid}
    >
      <div style={{ height: `${props.count * props.rowHeight}px`, position: "relative" }}>{rows}</div>
    </div>
  );
}

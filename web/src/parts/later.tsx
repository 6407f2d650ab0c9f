/** Views whose script comes when they are first shown: the first visit does not wait for them. */
import { signal } from "@preact/signals";
import type { ComponentChildren, ComponentType } from "preact";
import { useEffect } from "preact/hooks";
import { ApiError } from "../api";
import { Empty, ErrorCard } from "./basics";

export interface FrameProps<P> {
  /** Of the view that is to come. */
  readonly view: P;
  readonly isBusy: boolean;
  readonly children: ComponentChildren;
}

/**
 * A component in whose place `Frame` stands until `load` has brought it, once for all places. A failure is shown there,
 * and can be tried again.
 */
export function later<P extends object>(
  load: () => Promise<ComponentType<P>>,
  Frame: ComponentType<FrameProps<P>>,
): ComponentType<P> {
  const found = signal<ComponentType<P> | null>(null);
  const failure = signal<ApiError | null>(null);
  let isUnderWay = false;
  const fetchIt = async () => {
    if (isUnderWay) return;
    isUnderWay = true;
    failure.value = null;
    try {
      found.value = await load();
    } catch (cause) {
      failure.value = failed(cause);
    } finally {
      isUnderWay = false;
    }
  };
  return function Later(props: P) {
    useEffect(() => {
      if (found.peek() === null) void fetchIt();
    }, []);
    const View = found.value;
    if (View !== null) return <View {...props} />;
    return (
      <Frame view={props} isBusy={failure.value === null}>
        {failure.value === null ? (
          <Empty title="Loading…" />
        ) : (
          <ErrorCard error={failure.value} retry={() => void fetchIt()} />
        )}
      </Frame>
    );
  };
}

/** A page of its own. */
export function PageFrame({ isBusy, children }: FrameProps<object>) {
  return (
    <main class="page" id="main" aria-busy={isBusy}>
      {children}
    </main>
  );
}

/** A tab of a page. */
export function PanelFrame({ isBusy, children }: FrameProps<object>) {
  return (
    <section class="panel" aria-busy={isBusy}>
      {children}
    </section>
  );
}

function failed(cause: unknown): ApiError {
  const error = new ApiError(
    0,
    "The script of this view could not be loaded.",
    "The server may be unreachable. If it was upgraded since this page was opened, reload the page.",
  );
  error.cause = cause;
  return error;
}

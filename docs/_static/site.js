// The arrows that open parts of the table of contents get a name, for those who do not see them.
document.addEventListener("DOMContentLoaded", () => {
  for (const arrow of document.querySelectorAll("nav details > summary:not([aria-label])")) {
    const link = arrow.closest("li").querySelector("a");
    arrow.setAttribute("aria-label", `Pages of ${link.textContent.trim()}`);
  }
});

// Pictures with a dark version follow the theme of the page, which its reader may have chosen against the system's.
const DARK = "picture > source[media*='prefers-color-scheme: dark'], picture > source[data-dark]";
const follow = () => {
  for (const source of document.querySelectorAll(DARK)) {
    source.dataset.dark = "";
    source.media = document.documentElement.dataset.theme === "dark" ? "all" : "not all";
  }
};
document.addEventListener("DOMContentLoaded", follow);
new MutationObserver(follow).observe(document.documentElement, { attributeFilter: ["data-theme"] });

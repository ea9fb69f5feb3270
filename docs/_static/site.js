// The arrows that open parts of the table of contents get a name, for those who do not see them.
document.addEventListener("DOMContentLoaded", () => {
  for (const arrow of document.querySelectorAll("nav details > summary:not([aria-label])")) {
    const link = arrow.closest("li").querySelector("a");
    arrow.setAttribute("aria-label", `Pages of ${link.textContent.trim()}`);
  }
});
